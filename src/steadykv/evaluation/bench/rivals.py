"""What else does the work: SDPA's backends, the public release of Quant VideoGen, pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .timing import Timing, measure

__all__ = ["Release", "best_attention", "host_copy"]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def best_attention(
    q: Tensor, k: Tensor, v: Tensor, seconds: float
) -> tuple[str, Timing, Callable[[], Tensor]]:
    """The fastest backend of SDPA on [B, H, S, D], its time, and a call of it."""

    def call_of(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        return call

    found = []
    for name, backend in _BACKENDS.items():
        call = call_of(backend)
        try:
            call()
        except RuntimeError:  # this backend does not take this device, dtype or head dim
            continue
        found.append((name, measure([call], q.device, seconds), call))
    if not found:
        call = call_of(SDPBackend.MATH)
        return "math", measure([call], q.device, seconds), call
    return min(found, key=lambda item: item[1].median)


def host_copy(k: Tensor, v: Tensor) -> Callable[[], object]:
    """A call that brings keys and values in BF16 from pinned host memory."""
    hosts = [t.to("cpu").pin_memory() for t in (k, v)]
    targets = [torch.empty_like(t) for t in (k, v)]

    def call() -> object:
        for host, target in zip(hosts, targets, strict=True):
            target.copy_(host, non_blocking=True)
        return targets

    return call


class Release:
    """quant-videogen 0.1.0, as far as it is installed and can run: None from `find` else.

    It wants CUDA, and draws its first centroids from the global generator, which is put back.
    """

    PACKAGE = "quant_videogen"

    def __init__(self) -> None:
        real = import_module(f"{self.PACKAGE}.real.prq")
        self._quantize: Any = real.prq_quant
        self._dequantize: Any = real.prq_dequant

    @classmethod
    def find(cls, device: torch.device) -> Release | None:
        """The release, where the device is a GPU and its package and dependencies import."""
        if device.type != "cuda" or not find_spec(cls.PACKAGE):
            return None
        try:
            return cls()
        except ImportError:
            return None

    def encode(self, x: Tensor, iterations: int, centroids: int, group_size: int) -> Any:
        """What it makes of BF16 [B, H, S, D] at 2 bits with one stage."""
        with torch.random.fork_rng([x.device]):
            return self._quantize(
                x,
                n_stages=1,
                n_clusters=centroids,
                block_size=group_size,
                num_bits=2,
                scale_precision=torch.float8_e4m3fn,
                max_iters=iterations,
                PACK_OUTPUT_INT8=True,
                CLUSTER_ID_INT8=True,
            )

    def decode(self, encoded: Any, group_size: int) -> Tensor:
        """The tokens again, BF16."""
        centroids, ids, codes, scales, zeros = encoded
        return self._dequantize(
            centroids,
            ids,
            codes,
            scales,
            group_size,
            num_bits=2,
            PACK_INPUT_INT8=True,
            CLUSTER_ID_INT8=True,
            output_dtype=torch.bfloat16,
            zeros=zeros,
        )
