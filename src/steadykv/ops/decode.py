"""Contract: packed tokens into a dense view. This is the read path.

`torch.compile` sees each function as one operator (`torch.ops.steadykv.decode_clustered`, …) that
writes `out`: nothing inside is traced, and the implementation is chosen when the operator runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..reference.blocks import Decoder
from .dispatch import resolve
from .precision import full_precision

__all__ = [
    "Decoder",
    "clustered_decoder",
    "decode_clustered",
    "decode_grouped",
    "decode_nonuniform",
    "grouped_decoder",
]


def decode_clustered(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    start: int,
    end: int,
    *,
    packing: str = "bits",
    refinement: int = 0,
    backend: str | None = None,
) -> None:
    """(mu_1[id] + …) + residual + alpha·(basis·codes) of tokens start..end: FP32 sums, one cast.

    tensors: of a qvg, qvg4 or quantwm payload, [B, H, ...] or sparse coefficients; centroids are
    BF16, or E4M3 times `centroid_scale`. grid, bits, group_size, packing: as in `group_quantize`.
    refinement: bits of the `refinement` in them, or 0 to read the codes alone.
    out: [B, H, end-start, D], float, any strides, on the same device. An FP16 `out` saturates.
    The reference allocates FP32 row blocks, and FP32 copies of E4M3 centroids; nothing that grows
    with S. The kernel allocates nothing. Sparse coefficients are made dense by both: r + 2 bytes a
    token. The kernel's values are the reference's, but for the order in which alpha·(basis·codes)
    is summed.
    """
    if torch.compiler.is_compiling():
        names, packed = ",".join(tensors), list(tensors.values())
        _clustered(
            names, packed, out, grid, bits, group_size, start, end, packing, refinement, backend
        )
        return
    module = resolve("decode", out.device, backend)
    module.decode_clustered(tensors, out, grid, bits, group_size, start, end, packing, refinement)


def decode_grouped(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    axis: str,
    start: int,
    end: int,
    *,
    packing: str = "bits",
    rotation: Sequence[int] = (),
    backend: str | None = None,
) -> None:
    """The same for payloads that hold nothing but groups (rtn, kivi, quarot).

    rotation: widths of `hadamard`, which turns the FP32 values back before the cast; empty for
    values in the frame of the host.
    """
    if torch.compiler.is_compiling():
        names, packed, widths = ",".join(tensors), list(tensors.values()), list(rotation)
        _grouped(
            names, packed, out, grid, bits, group_size, axis, start, end, packing, widths, backend
        )
        return
    module = resolve("decode", out.device, backend)
    module.decode_grouped(tensors, out, grid, bits, group_size, axis, start, end, packing, rotation)


def decode_nonuniform(
    tensors: Mapping[str, Tensor],
    out: Tensor,
    axis: str,
    bits: int,
    start: int,
    end: int,
    *,
    backend: str | None = None,
) -> None:
    """The same for kvquant payloads; the tokens in `dense` come first."""
    if torch.compiler.is_compiling():
        _nonuniform(",".join(tensors), list(tensors.values()), out, axis, bits, start, end, backend)
        return
    module = resolve("decode", out.device, backend)
    module.decode_nonuniform(tensors, out, axis, bits, start, end)


def clustered_decoder(
    tensors: Mapping[str, Tensor],
    width: int,
    grid: str,
    bits: int,
    group_size: int,
    packing: str,
    refinement: int = 0,
) -> Decoder | None:
    """`decode_clustered` of one payload, D = width, prepared to be called again and again.

    None where nothing would be gained: no kernel, sparse coefficients, inside `torch.compile`.
    """
    make = _maker("clustered_decoder", tensors)
    return make(tensors, width, grid, bits, group_size, packing, refinement) if make else None


def grouped_decoder(
    tensors: Mapping[str, Tensor],
    width: int,
    grid: str,
    bits: int,
    group_size: int,
    axis: str,
    packing: str = "bits",
    rotation: Sequence[int] = (),
) -> Decoder | None:
    """The same of `decode_grouped`."""
    make = _maker("grouped_decoder", tensors)
    return make(tensors, width, grid, bits, group_size, axis, packing, rotation) if make else None


def _maker(name: str, tensors: Mapping[str, Tensor]) -> Callable[..., Decoder | None] | None:
    if torch.compiler.is_compiling() or "row_index" in tensors:
        return None
    return getattr(resolve("decode", tensors["codes"].device), name, None)


@torch.library.custom_op("steadykv::decode_clustered", mutates_args=("out",))
def _clustered(
    names: str,
    tensors: Sequence[Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    start: int,
    end: int,
    packing: str,
    refinement: int,
    backend: str | None,
) -> None:
    packed = dict(zip(names.split(","), tensors, strict=True))
    with full_precision(out.device):
        decode_clustered(
            packed,
            out,
            grid,
            bits,
            group_size,
            start,
            end,
            packing=packing,
            refinement=refinement,
            backend=backend,
        )


@torch.library.custom_op("steadykv::decode_grouped", mutates_args=("out",))
def _grouped(
    names: str,
    tensors: Sequence[Tensor],
    out: Tensor,
    grid: str,
    bits: int,
    group_size: int,
    axis: str,
    start: int,
    end: int,
    packing: str,
    rotation: Sequence[int],
    backend: str | None,
) -> None:
    packed = dict(zip(names.split(","), tensors, strict=True))
    with full_precision(out.device):
        decode_grouped(
            packed,
            out,
            grid,
            bits,
            group_size,
            axis,
            start,
            end,
            packing=packing,
            rotation=rotation,
            backend=backend,
        )


@torch.library.custom_op("steadykv::decode_nonuniform", mutates_args=("out",))
def _nonuniform(
    names: str,
    tensors: Sequence[Tensor],
    out: Tensor,
    axis: str,
    bits: int,
    start: int,
    end: int,
    backend: str | None,
) -> None:
    packed = dict(zip(names.split(","), tensors, strict=True))
    with full_precision(out.device):
        decode_nonuniform(packed, out, axis, bits, start, end, backend=backend)


for operator in (_clustered, _grouped, _nonuniform):
    operator.register_fake(lambda *args: None)  # nothing is returned
del operator
