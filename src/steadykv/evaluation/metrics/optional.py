"""Packages that only some metrics need."""

from __future__ import annotations

import importlib
from typing import Any

from steadykv.errors import BackendUnavailable


def optional_module(module: str, metric: str, extra: str) -> Any:
    """The imported ``module``; without it BackendUnavailable says how to install ``extra``."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise  # it is there, but what it needs is not
        raise BackendUnavailable(
            f"{metric} got no module {module}; expected the optional extra {extra!r}: "
            f"pip install 'steadykv[{extra}]'"
        ) from error
