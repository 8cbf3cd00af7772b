"""FP32 that is FP32, whatever the host has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import torch

__all__ = ["full_precision"]

_BACKENDS = {
    "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    "cuda": torch.backends.cuda.matmul,
}


def full_precision(device: torch.device) -> AbstractContextManager[None]:
    """Inside, matrix products of FP32 tensors are FP32: no autocast, TF32 or BF16; no gradients.

    Hosts run their model under autocast and often lower `torch.set_float32_matmul_precision`, on
    CPUs too; the query moment is nearly singular, and the payload has to be the same with or
    without either. The host's settings come back on exit. A function that is being compiled cannot
    change them: there, kernels, which never use TF32, make the difference.
    """
    return _traced(device.type) if torch.compiler.is_compiling() else _FullPrecision(device.type)


class _FullPrecision(AbstractContextManager[None]):
    """Leaves alone what is so already, as one of these is inside another."""

    __slots__ = ("autocast", "before", "device", "gradients")

    def __init__(self, device: str) -> None:
        self.device = device

    def __enter__(self) -> None:
        self.gradients = torch.no_grad() if torch.is_grad_enabled() else None
        if self.gradients is not None:
            self.gradients.__enter__()
        self.autocast = None
        if torch.is_autocast_enabled(self.device):
            self.autocast = torch.autocast(self.device, enabled=False)
            self.autocast.__enter__()
        backend = _BACKENDS.get(self.device)
        self.before = "ieee" if backend is None else backend.fp32_precision
        if self.before != "ieee":
            _BACKENDS[self.device].fp32_precision = "ieee"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.before != "ieee":
            _BACKENDS[self.device].fp32_precision = self.before
        if self.autocast is not None:
            self.autocast.__exit__(kind, error, trace)
        if self.gradients is not None:
            self.gradients.__exit__(kind, error, trace)


@contextmanager
def _traced(device: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device, enabled=False):
        yield
