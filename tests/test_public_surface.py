"""What users may rely on: public names, the table of methods, and the places that list them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import steadykv
from steadykv.codecs import CODECS
from steadykv.config import METHODS, PRESETS
from tests.codecs import CASES
from tests.test_layout import LIBRARY, MODULES, PACKAGE, ROOT, short

# A change here is a change of the public surface: CHANGELOG.md says so.
PUBLIC = [
    "AttachedCaches",
    "BackendUnavailable",
    "CacheConfig",
    "CachePolicy",
    "Calibration",
    "CalibrationError",
    "CodecConfig",
    "ConfigError",
    "HostError",
    "KVCache",
    "LayerCache",
    "NonFiniteError",
    "Payload",
    "PayloadError",
    "Plan",
    "PositionError",
    "QueryMoment",
    "ShapeError",
    "SpanKey",
    "SteadyKVError",
    "attach",
    "decode",
    "encode",
    "explain",
    "parse_method",
    "plan",
    "preset",
    "rotate",
    "use_backend",
]


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_all_is_the_public_surface() -> None:
    assert steadykv.__all__ == PUBLIC
    assert set(PUBLIC) <= set(dir(steadykv))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_load_and_are_documented(name: str) -> None:
    thing = getattr(steadykv, name)
    assert thing.__module__.startswith("steadykv.")
    assert inspect.getdoc(thing)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_tested(name: str) -> None:
    """Some test module uses the name: this one, which only lists it, does not count."""
    word = re.compile(rf"\b{name}\b")
    users = [
        path
        for path in MODULES
        if path.is_relative_to(ROOT / "tests")
        and path != Path(__file__)
        and word.search(path.read_text(encoding="utf-8"))
    ]
    assert users


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_every_all_is_true(path: Path) -> None:
    """Each name in a module's `__all__` exists there."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    if not any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for node in body
    ):
        return
    module = importlib.import_module(dotted(path))
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert not missing
    assert len(set(module.__all__)) == len(module.__all__)


def test_one_table_of_methods() -> None:
    """The registry, the fields each method reads and the list that every property test walks."""
    assert set(CODECS) == set(METHODS)
    assert {case.config.method for case in CASES} == set(CODECS)


@pytest.mark.parametrize("method", CODECS)
def test_each_method_is_one_file(method: str) -> None:
    """codecs/qvg.py holds QVGCodec; bf16, which packs nothing, is codecs/dense.py."""
    stem = {"bf16": "dense"}.get(method, method)
    assert CODECS[method].__module__ == f"steadykv.codecs.{stem}"
    assert CODECS[method].__name__.lower() == f"{method}codec"


def test_readme_lists_every_preset_and_no_other() -> None:
    """README's table of methods: rows that start with a preset's name in backquotes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\|\s*`([a-z0-9_]+)`\s*\|", readme, re.MULTILINE))
    assert rows == set(PRESETS)
