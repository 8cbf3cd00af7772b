"""Packages that some hosts live in; a test of them is skipped only where nobody asked for them."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def dev_packages() -> set[str]:
    """What the `dev` extra installs, by name."""
    with PYPROJECT.open("rb") as file:
        lines = tomllib.load(file)["project"]["optional-dependencies"]["dev"]
    return {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower() for line in lines}


def require(*names: str) -> None:
    """Skip the module where a package is missing; an error where the `dev` extra has it."""
    _require(names, allow_module_level=True)


def require_in_test(*names: str) -> None:
    """Skip the test that runs, in the same way."""
    _require(names, allow_module_level=False)


def _require(names: Iterable[str], allow_module_level: bool) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            if name in dev_packages():
                raise
            pytest.skip(f"{name} is not installed", allow_module_level=allow_module_level)
