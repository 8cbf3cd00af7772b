"""Keeps the host's modes out of the cache's state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from steadykv.cache.checks import Geometry
from steadykv.ops.precision import full_precision

__all__ = ["isolated"]


class _HasGeometry(Protocol):
    @property
    def geometry(self) -> Geometry: ...


_Self = TypeVar("_Self", bound=_HasGeometry)
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def isolated(
    method: Callable[Concatenate[_Self, _Params], _Result],
) -> Callable[Concatenate[_Self, _Params], _Result]:
    """Run a method that changes state outside autograd, autocast, TF32 and inference mode.

    Inference mode, because a tensor made under it could not be updated after it.
    """

    @functools.wraps(method)
    def run(self: _Self, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with torch.inference_mode(False), full_precision(self.geometry.device):
            return method(self, *args, **kwargs)

    return run
