"""The architecture holds: who may import whom, file names that match, sizes, forbidden words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steadykv.ops.dispatch import KERNELS, OPS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "steadykv"
MAX_LINES = 400

# Data goes forward only: a folder or module imports from its own line and the lines above it.
LAYERS = (
    {"errors", "game"},
    {"config"},
    {"reference", "kernels"},
    {"ops"},
    {"codecs"},
    {"cache"},
    {"capture"},
    {"hosts", "planning", "world"},
    {"evaluation"},
    {"report"},
    {"cli"},
)
# Imports against that order, made inside a function when it is called, and why.
BACKWARD = {
    ("config", "codecs"),  # predicting payload bytes asks the codec that will make them
}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Modules of the op folders that are no op: shared helpers.
SUPPORT = {
    "ops": {"dispatch", "precision"},
    "reference": {"blocks"},
    "kernels": {
        "assign",
        "centroids",
        "codes",
        "decode_groups",
        "decode_levels",
        "decode_pairs",
        "eigen",
        "grids",
        "launch",
        "means",
        "networks",
        "numbers",
        "packing",
        "pairs",
        "passes",
        "residual",
        "rounded",
        "streams",
        "tiles",
        "vendor",
    },
}

# Host models, as they may be written in code; only an adapter in hosts/ may name one.
HOST_NAMES = re.compile(
    r"long_?cat|self_?forcing|causal_?forcing|ling_?bot|matrix_?game|world_?play|hunyuan|"
    r"(?<![a-z])wan(?:2|_|$)|fast_?video|diffusers|sglang",
    re.IGNORECASE,
)

# torch functions that draw from the global generator unless they are given one.
RANDOM_FUNCTIONS = {
    "rand", "randn", "randint", "randperm", "normal", "multinomial", "bernoulli", "poisson",
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "geometric_",
}  # fmt: skip


def repository_files() -> list[Path]:
    """Tracked files and new ones that are not ignored; all files where this is no git checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        files = [ROOT / line for line in listed.stdout.split("\0") if line]
    else:
        folders = [".ci", "src", "tests", "training", "benchmarks", "docs", "examples"]
        files = [p for folder in folders for p in (ROOT / folder).rglob("*")]
        files += list(ROOT.glob("*"))
        files = [p for p in files if "__pycache__" not in p.parts]
    return sorted(path for path in files if path.is_file())


FILES = repository_files()
MODULES = [path for path in FILES if path.suffix == ".py"]
LIBRARY = [path for path in MODULES if path.is_relative_to(PACKAGE)]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=short(path))


def part_of(path: Path) -> str:
    """The part of the package a module belongs to: "codecs" for codecs/qvg.py, "config"."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(path: Path, on_load: bool = False) -> Iterator[str]:
    """Absolute dotted names of everything a module imports, or only of what it does when loaded.

    `from steadykv import codecs` counts as an import of steadykv.codecs.
    """
    package = ["steadykv", *path.relative_to(PACKAGE).parts[:-1]]
    module = tree(path)
    for node in module.body if on_load else ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                kept = package[: len(package) - node.level + 1]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def modules_of(folder: str) -> set[str]:
    return {path.stem for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"}


def test_the_checkout_is_seen() -> None:
    """Every test below walks these lists: an empty list would let all of them pass."""
    assert len(LIBRARY) >= 20
    assert {part_of(path) for path in LIBRARY} >= {"config", "codecs", "cache", "ops", "reference"}
    assert Path(__file__) in MODULES


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_modules_stay_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= MAX_LINES, f"{short(path)} has {lines} lines: split it"


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_only_kernels_import_triton(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported_modules(path)}
    assert "triton" not in roots or part_of(path) == "kernels"


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_imports_go_forward_only(path: Path) -> None:
    part = part_of(path)
    if part in {"__init__", "__main__"}:
        return
    assert part in RANK, f"{short(path)}: add the new part to LAYERS, where its imports allow"

    def backward_imports(on_load: bool) -> set[str]:
        names = [name.split(".") for name in imported_modules(path, on_load)]
        used = {name[1] for name in names if name[0] == "steadykv" and len(name) > 1}
        return {name for name in used & RANK.keys() if RANK[name] > RANK[part]}

    allowed = {name for user, name in BACKWARD if user == part} - backward_imports(on_load=True)
    backward = backward_imports(on_load=False) - allowed
    assert not backward, f"{short(path)} imports from {sorted(backward)}, which build on {part}"


def test_every_op_has_its_reference_and_every_kernel_both() -> None:
    """One file name an op in ops/, reference/ and, once it has one, kernels/."""
    assert modules_of("ops") - SUPPORT["ops"] == set(OPS)
    assert modules_of("reference") - SUPPORT["reference"] == set(OPS)
    assert modules_of("kernels") - SUPPORT["kernels"] == set(KERNELS)


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_nothing_below_hosts_names_a_model(path: Path) -> None:
    """Names and strings of the code; docstrings and comments may say where a number was seen."""
    if part_of(path) == "hosts":
        return
    module = tree(path)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words = [path.stem]
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words += [] if id(node) in docstrings else [node.value]
        else:
            words += [str(getattr(node, field)) for field in ("id", "attr", "arg", "name")
                      if getattr(node, field, None)]  # fmt: skip
    named = [word for word in words if HOST_NAMES.search(word)]
    assert not named, f"{short(path)} names host models: {named}"


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_random_numbers_come_from_a_private_generator(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr.removesuffix("_like") not in RANDOM_FUNCTIONS:
            continue
        keywords = {keyword.arg for keyword in node.keywords}
        owner = node.func.value
        on_generator = isinstance(owner, ast.Name) and owner.id in {"rng", "generator"}
        assert "generator" in keywords or on_generator, (
            f"{short(path)}:{node.lineno} draws from the global generator: pass generator="
        )


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_library_code_allocates_where_it_can_be_poisoned(path: Path) -> None:
    """`from torch import empty` would bind the function before `poisoned_memory` replaces it."""
    bound = [name for name in imported_modules(path) if re.match(r"torch\.empty", name)]
    assert not bound


@pytest.mark.parametrize("path", LIBRARY, ids=short)
def test_nothing_is_left_unfinished(path: Path) -> None:
    marks = re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", path.read_text("utf-8"))
    assert not marks


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    places = ["work", "root", "home", "Users", "mnt", "opt"]
    pattern = re.compile(r"(?<![\w.\-/}])/(?:" + "|".join(places) + r")/\w|[A-Z]:\\\\?Users")
    found = []
    for path in FILES:
        data = path.read_bytes()
        if b"\0" in data[:8192]:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{short(path)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def in_fresh_python(program: str) -> str:
    """What `program` prints in an interpreter in which triton cannot be imported."""
    program = "import sys; sys.modules['triton'] = None\n" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_neither_torch_nor_numpy() -> None:
    program = "import steadykv; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert in_fresh_python(program) == "[]"


def test_public_names_need_only_torch() -> None:
    """The library must not load what only the demo and the report need, nor need triton."""
    heavy = ["triton", "matplotlib", "av", "PIL", "typer", "rich", "steadykv.world"]
    program = (
        "import torch, steadykv; before = set(sys.modules)\n"
        "for name in steadykv.__all__: getattr(steadykv, name)\n"
        f"print([name for name in {heavy} if name in set(sys.modules) - before])"
    )
    assert in_fresh_python(program) == "[]"
