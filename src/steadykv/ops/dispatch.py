"""Which implementation of an op runs.

The first that says something decides: the `backend` argument of the call, the `use_backend`
context, the environment variable STEADYKV_BACKEND, the automatic order. A backend is asked by op
and device alone, so that the choice is static. A backend named explicitly that cannot serve raises
`BackendUnavailable`; it is never replaced in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from ..errors import BackendUnavailable

__all__ = ["BACKENDS", "KERNELS", "OPS", "backend_of", "explain", "resolve", "use_backend"]

VARIABLE = "STEADYKV_BACKEND"
_INTERPRET = "TRITON_INTERPRET"

# One module a name, under the same name, in every backend's folder.
OPS = (
    "attention",
    "decode",
    "finite",
    "group_quantize",
    "hadamard",
    "kmeans",
    "nonuniform",
    "pack",
    "psac",
    "qsac",
    "query_moment",
)

# Those of them that have a module of kernels.
KERNELS: tuple[str, ...] = (
    "attention",
    "decode",
    "finite",
    "group_quantize",
    "kmeans",
    "psac",
    "qsac",
    "query_moment",
)

OLDEST_CAPABILITY = (8, 0)  # BF16 in the matrix units

HAS_TRITON = find_spec("triton") is not None


def _refuse_triton(op: str, device: torch.device, named: bool) -> str | None:
    if op not in KERNELS:
        return "it has no kernel"
    if not HAS_TRITON:
        return "triton is not installed: pip install 'steadykv[triton]'"
    if _variable(_INTERPRET) == "1":  # for tests: slow, so never chosen by itself
        return None if named else "triton interprets here: name the backend to use it"
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    capability = _capability(device.index)
    if capability < OLDEST_CAPABILITY:
        return (
            f"the device has compute capability {capability[0]}.{capability[1]}, expected "
            f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} (Ampere) or newer"
        )
    return None


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# Backend -> a function of (op, device, whether it was named explicitly) that returns why it cannot
# serve, or None. In automatic order.
BACKENDS: dict[str, Callable[[str, torch.device, bool], str | None]] = {
    "triton": _refuse_triton,
    "reference": lambda op, device, named: None,
}
_FOLDERS = {"triton": "kernels", "reference": "reference"}

# The dictionary behind os.environ, if this Python has one, and its keys.
_VARIABLES: Any = getattr(os.environ, "_data", None)
_KEYS: dict[str, Any] = {}
if isinstance(_VARIABLES, dict):
    _KEYS = {name: os.environ.encodekey(name) for name in (VARIABLE, _INTERPRET)}

_context: ContextVar[str | None] = ContextVar("steadykv_backend", default=None)
_modules: dict[tuple[str, str], ModuleType] = {}
_taken: dict[tuple[str, str, int | None, str | None], ModuleType] = {}  # by what was asked last


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Every op called inside runs on backend `name`, or raises BackendUnavailable."""
    _check_known(name, "use_backend")
    token = _context.set(name)
    try:
        yield
    finally:
        _context.reset(token)


def resolve(op: str, device: torch.device, backend: str | None = None) -> ModuleType:
    """The module that implements `op` on `device`.

    Inside `torch.compile` the one that the last call before took, as contexts and the environment
    cannot be traced: run the function once before it is compiled.
    """
    asked = (op, device.type, device.index, backend)
    if torch.compiler.is_compiling() and asked in _taken:
        return _taken[asked]
    name = _choose(op, device, backend)[0]
    module = _modules.get((name, op))
    if module is None:
        module = _modules[name, op] = import_module(f"steadykv.{_FOLDERS[name]}.{op}")
    _taken[asked] = module
    return module


def backend_of(op: str, device: torch.device) -> str:
    """The backend that `op` runs on here."""
    return _choose(op, device, None)[0]


def explain(device: torch.device | str = "cpu") -> list[dict[str, str]]:
    """What each op resolves to on `device`, and why: rows with op, backend, reason."""
    rows = []
    for op in OPS:
        name, reason = _choose(op, torch.device(device), None)
        rows.append({"op": op, "backend": name, "reason": reason})
    return rows


def _choose(op: str, device: torch.device, backend: str | None) -> tuple[str, str]:
    source = "call argument"
    if backend is None:
        backend, source = _context.get(), "use_backend"
    if backend is None:
        backend, source = _variable(VARIABLE) or None, VARIABLE
    if backend is not None:
        _check_known(backend, source)
        refusal = BACKENDS[backend](op, device, True)
        if refusal:
            raise BackendUnavailable(
                f"{source} asks for {backend!r}, which cannot run {op} on {device}: {refusal}"
            )
        return backend, source
    refusals: list[str] = []
    for name, refuse in BACKENDS.items():
        refusal = refuse(op, device, False)
        if refusal is None:
            return name, "; ".join(["automatic", *refusals])
        refusals.append(f"not {name}: {refusal}")
    raise BackendUnavailable(f"no backend can run {op} on {device}: {'; '.join(refusals)}")


def _variable(name: str) -> str | None:
    """Of the environment as it is now; to say that one is not there takes it an exception."""
    key = _KEYS.get(name)
    return None if key is not None and key not in _VARIABLES else os.environ.get(name)


def _check_known(name: str, source: str) -> None:
    if name not in BACKENDS:
        raise BackendUnavailable(
            f"{source} asks for backend {name!r}, which this release does not have: "
            f"expected {' or '.join(map(repr, BACKENDS))}"
        )
