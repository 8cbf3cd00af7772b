"""What every codec is: a layout, an encoder of FP32 rows and a decoder into a view.

Codecs see N = B·H independent heads; nothing they compute crosses N, or, where a method pools
heads by definition (`Codec.pools_heads`), the B rows that N is made of.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..config import CodecConfig
from ..errors import PayloadError
from ..reference.blocks import Decoder, Heads

if TYPE_CHECKING:
    from .calibration import CalibratedGrid

__all__ = [
    "FLAGS",
    "GPU_WORKSPACE_BYTES",
    "KERNEL_WORKSPACE_BYTES",
    "WORKSPACE_BYTES",
    "Codec",
    "Encoded",
    "HeadInputs",
    "Shape",
    "SpanKey",
    "TensorSpec",
    "WarmStart",
    "check_trits",
]

Shape = tuple[int, int, int, int]

# FP32 bytes of the tokens that one pass of encode works on; it takes about three times as much. On
# the CPU the work is done head by head and block by block anyway, so larger passes gain no time: 8
# MiB are three heads of 4,680 tokens (2.4 MB each). On a GPU, 64 MiB are a whole layer of them.
WORKSPACE_BYTES = 8 << 20
GPU_WORKSPACE_BYTES = 64 << 20
# Kernels take a layer of any model in one pass, in BF16 and nearly without copies of it.
KERNEL_WORKSPACE_BYTES = 512 << 20

FLAGS = {
    "nonfinite": torch.int64,
    "saturated": torch.int64,
    "weight_active": torch.uint8,
    "psac_active": torch.uint8,
    "psac_failed": torch.uint8,
}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one payload tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor like this."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class SpanKey:
    """Which span of which tensor is encoded; with the seed it decides the cold-start centroids."""

    layer: int = 0
    tensor: str = "key"
    span: int = 0

    def generator(self, seed: int, stage: int) -> torch.Generator:
        """A private CPU generator, seeded with crc32 of "seed/layer/tensor/span/stage"."""
        text = f"{seed}/{self.layer}/{self.tensor}/{self.span}/{stage}"
        return torch.Generator("cpu").manual_seed(zlib.crc32(text.encode()))


class WarmStart(NamedTuple):
    """What the k-means of a span may start from: the span before it.

    centroids: BF16 or FP32 [B, H, T, C, D]. ids: uint8 or uint16 [B, H, T, S] of its tokens, to
    start from the means of the new tokens at the same places; None to start from the centroids
    themselves.
    """

    centroids: Tensor
    ids: Tensor | None = None


@dataclass(frozen=True)
class HeadInputs:
    """What an encoder may use beside the tokens, for the N heads of one pass.

    moment: FP32 [N, D, D] query second moment, or None. count: int64 [N] queries in it, or None.
    initial_centroids: [N, T, C_eff, D] to start k-means from, or None for a cold start.
    initial_ids: [N, T, S], to start from the means of the tokens under these ids instead; the
    centroids are then those of empty clusters.
    span_key: seeds the cold start.
    heads: H, for codecs that pool heads: N is a multiple of it.
    grid: levels and thresholds fixed beforehand, on the tokens' device, or None.
    """

    span_key: SpanKey = field(default_factory=SpanKey)
    moment: Tensor | None = None
    count: Tensor | None = None
    initial_centroids: Tensor | None = None
    initial_ids: Tensor | None = None
    heads: int = 1
    grid: CalibratedGrid | None = None


@dataclass
class Encoded:
    """Tensors and flags of one pass, N first; row_tensors have one entry a batch row instead."""

    tensors: dict[str, Tensor]
    flags: dict[str, Tensor] = field(default_factory=dict)
    row_tensors: dict[str, Tensor] = field(default_factory=dict)


class Codec(ABC):
    """One method with its configuration. Subclasses hold no state beside it.

    title: how the method is called in print.
    flags: the names of `FLAGS` that its payloads carry.
    needs_queries: whether it gets better with the query moment. is_dense: whether it stores 16-bit
    numbers as they are, so that nothing is gained by packing.
    pools_heads: whether statistics span the heads of a batch row: a pass then has whole rows, and
    permuting heads changes more than places.
    encode_copies, decode_copies: upper bounds of what encoding and decoding allocate beside their
    results, in FP32 copies of the tokens of one pass (measured, plus a few percent). encode_blocks:
    the same, in row blocks of rounding, for encoding. The defaults are above what any method needs.
    kernel_copies: the same as encode_copies, cleaning included, in kernels.
    """

    title: ClassVar[str]
    flags: tuple[str, ...] = ("nonfinite", "saturated")
    needs_queries: ClassVar[bool] = False
    is_dense: ClassVar[bool] = False
    pools_heads: ClassVar[bool] = False
    encode_copies: ClassVar[float] = 4.6
    encode_blocks: ClassVar[float] = 0.0
    decode_copies: ClassVar[float] = 3.4
    kernel_copies: ClassVar[float] = 0.0

    def __init__(self, config: CodecConfig) -> None:
        self.config = config

    @property
    def has_kernels(self) -> bool:
        """Whether kernels can do all of the encoding; they read BF16, and all heads at once."""
        return False

    @abstractmethod
    def layout(self, shape: Shape, compensated: bool) -> dict[str, TensorSpec]:
        """Every stored tensor of a [B, H, S, D] span, before encoding (dense coefficients)."""

    @abstractmethod
    def encode(self, x: Tensor, inputs: HeadInputs) -> Encoded:
        """Packs finite, contiguous FP32 [N, S, D], S > 0, into the tensors of `layout`, N first."""

    @abstractmethod
    def decode(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """Writes tokens start..end into `out` [B, H, end - start, D], any strides and dtype."""

    def decoder(self, tensors: Mapping[str, Tensor], shape: Shape) -> Decoder:
        """`decode` of one payload, for callers that want it in many parts."""
        return self.prepared(tensors, shape) or partial(self._decode_part, tensors, shape)

    def prepared(self, tensors: Mapping[str, Tensor], shape: Shape) -> Decoder | None:
        """`decoder` with all that does not change between calls done; None where nothing is."""
        return None

    def _decode_part(
        self,
        tensors: Mapping[str, Tensor],
        shape: Shape,
        part: Heads | None,
        out: Tensor,
        start: int,
        end: int,
    ) -> None:
        if part is not None and (part.rows, part.heads) != shape[:2]:
            tensors = {name: part.of(tensor) for name, tensor in tensors.items()}
            shape = (part.rows, part.heads, *shape[2:])
        self.decode(tensors, shape, out, start, end)

    def rotation(self, head_dim: int) -> tuple[int, ...]:
        """Widths of the Hadamard blocks (`ops.hadamard`) that have turned what is stored; empty
        where the frame is the host's."""
        return ()

    def decode_rotated(
        self, tensors: Mapping[str, Tensor], shape: Shape, out: Tensor, start: int, end: int
    ) -> None:
        """As `decode`, without turning anything back."""
        self.decode(tensors, shape, out, start, end)

    def encode_extra_nbytes(self, shape: Shape, block_nbytes: int) -> int:
        """Bytes that encoding takes beside all those copies, for a pass over [B, H, S, D].

        block_nbytes: the largest row block of the device.
        """
        return 0

    def finish(self, tensors: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
        """Last step over the whole payload [B, H, ...], after all passes."""
        return tensors

    def stored_layout(self, shape: Shape, tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
        """The layout that tensors read from a file claim to have."""
        return self.layout(shape, compensated="basis" in tensors)

    def check_indices(  # noqa: B027 - most codecs store no index
        self, shape: Shape, tensors: Mapping[str, Tensor]
    ) -> None:
        """Raises PayloadError where an index of a loaded payload points outside it."""


def check_trits(codes: Tensor, packing: str) -> None:
    """Raises PayloadError where packed trits hold a byte that five of them cannot make."""
    if packing == "trits" and codes.numel() and int(codes.max()) >= 3**5:
        raise PayloadError(
            f"codes hold the byte {int(codes.max())}: expected at most {3**5 - 1}, five trits"
        )
