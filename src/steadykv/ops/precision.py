"""FP32 that is FP32, whatever the host has switched on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["full_precision"]

_BACKENDS = {
    "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    "cuda": torch.backends.cuda.matmul,
}


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Inside, matrix products of FP32 tensors are FP32: no autocast, TF32 or BF16; no gradients.

    Hosts run their model under autocast and often lower `torch.set_float32_matmul_precision`, on
    CPUs too; the query moment is nearly singular, and the payload has to be the same with or
    without either. The host's settings come back on exit. A function that is being compiled cannot
    change them: there, kernels, which never use TF32, make the difference.
    """
    backend = None if torch.compiler.is_compiling() else _BACKENDS.get(device.type)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if backend is None:
            yield
            return
        before = backend.fp32_precision
        backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            backend.fp32_precision = before
