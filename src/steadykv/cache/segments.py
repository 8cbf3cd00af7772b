"""One tensor (keys or values) of one layer: segments in token order, each dense or packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from steadykv.cache.policy import TokenRange
from steadykv.codecs import Payload, WarmStart
from steadykv.ops import centroid_values

__all__ = ["Segment", "TensorStore", "nbytes_of", "part_of"]

# Payload tensor -> the part of the ledger it is counted in; an unlisted name is its own part.
_PARTS = {
    "scale": "scales",
    "minimum": "scales",
    "scale_codes": "scales",
    "scale_base": "scales",
    "zeros": "scales",
    "center": "scales",
    "half": "scales",
    "levels": "scales",
    "outlier_values": "outliers",
    "outlier_index": "outliers",
    "centroid_scale": "centroids",
    "coef_codes": "coefficients",
    "coef_scales": "coefficients",
    "row_index": "coefficients",
    "row_offsets": "coefficients",
}


def part_of(name: str) -> str:
    """The ledger part that the payload tensor `name` belongs to."""
    return _PARTS.get(name, name)


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) in one storage form.

    data: a dense tensor in the store's layout that owns its memory, or a `Payload`.
    role: ledger part of a dense segment: "open", "waiting" (to be packed) or "dense" (for good).
    reason: why a "dense" segment is not packed.
    """

    start: int
    end: int
    data: Tensor | Payload
    role: str = "waiting"
    reason: str = ""
    parts: dict[str, int] = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parts: dict[str, int] = {}
        if isinstance(self.data, Payload):
            for name, nbytes in self.data.nbytes_by_part().items():
                parts[part_of(name)] = parts.get(part_of(name), 0) + nbytes
            # Flags that say the same may share memory.
            flags = {t.untyped_storage().data_ptr(): t for t in self.data.flags.values()}
            parts["counters"] = sum(map(nbytes_of, flags.values()))
        else:
            parts[self.role] = nbytes_of(self.data)
        # Sizes are read once: neither a ledger nor a peak walks the tensors again.
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "nbytes", sum(parts.values()))

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def payload(self) -> Payload | None:
        return self.data if isinstance(self.data, Payload) else None

    @property
    def tensor(self) -> Tensor:
        """The tensor of a dense segment."""
        assert isinstance(self.data, Tensor)
        return self.data


class TensorStore:
    """Segments of one tensor. `token_dim` is 1 for the layout BSHD and 2 for BHSD.

    Dense segments keep the host's layout, so that a read copies rows and never permutes.
    prepared: what readers keep until the segments change, as every pass of a chunk reads the same.
    """

    def __init__(self, name: str, token_dim: int) -> None:
        self.name = name
        self.token_dim = token_dim
        self.clear()

    def clear(self) -> None:
        """Release everything."""
        self.segments: list[Segment] = []
        self.changed()
        self._warm: dict[str, Tensor] = {}
        self._warm_tokens = 0

    def heads_first(self, tensor: Tensor) -> Tensor:
        """A [B, H, S, D] view of a tensor in the store's layout."""
        return tensor if self.token_dim == 2 else tensor.transpose(1, 2)

    # --- changing -----------------------------------------------------------------------------

    def changed(self) -> None:
        """The segments are others: forget what was prepared for reading them."""
        self.prepared: dict[object, list[Any]] = {}

    def open_segment(self) -> Segment | None:
        """The open chunk, which is always the last segment."""
        last = self.segments[-1] if self.segments else None
        return last if last is not None and last.role == "open" else None

    def append(self, segment: Segment) -> None:
        """Take over a segment that follows the others; a dense one must own its memory."""
        self.segments.append(segment)
        self.changed()

    def take_last(self) -> Segment:
        """Remove the newest segment and hand it over."""
        self.changed()
        return self.segments.pop()

    def within(self, start: int, end: int) -> list[Segment]:
        """Segments that lie in [start, end)."""
        return [s for s in self.segments if start <= s.start and s.end <= end]

    def shape_of(self, segments: list[Segment]) -> tuple[int, int, int, int]:
        """(B, H, S, D) of dense neighbours taken together."""
        batch, heads, _, head_dim = self.heads_first(segments[0].tensor).shape
        return batch, heads, sum(segment.tokens for segment in segments), head_dim

    def replace(self, old: list[Segment], new: Segment) -> None:
        """Put one segment in the place of neighbours that hold the same tokens."""
        first = next(i for i, segment in enumerate(self.segments) if segment is old[0])
        self.segments[first : first + len(old)] = [new]
        self.changed()

    def join(self, start: int, end: int) -> Segment:
        """Make the dense segments within [start, end) one.

        Allocates the joined tensor when there are several, and releases those.
        """
        old = self.within(start, end)
        if len(old) == 1:
            return old[0]
        tensors = [segment.tensor for segment in old]
        joined = Segment(old[0].start, old[-1].end, torch.cat(tensors, dim=self.token_dim))
        self.replace(old, joined)
        return joined

    def fade(self, newest: int) -> None:
        """Drop the refinement of all packed segments but the newest ones."""
        packed = [i for i, segment in enumerate(self.segments) if segment.payload is not None]
        for index in packed[: max(0, len(packed) - newest)]:
            segment = self.segments[index]
            assert segment.payload is not None
            faded = segment.payload.unrefined()
            if faded is not segment.payload:
                self.segments[index] = replace(segment, data=faded)
                self.changed()

    def drop_where(self, has_left: Callable[[Segment], bool]) -> None:
        """Release segments."""
        self.segments = [segment for segment in self.segments if not has_left(segment)]
        self.changed()

    # --- warm start ---------------------------------------------------------------------------

    def remember(self, payload: Payload, with_ids: bool) -> None:
        """Let the next span of equal length start from this payload's centroids (no copy)."""
        wanted = {"centroids", "ids"} if with_ids else {"centroids"}
        has_clusters = "centroids" in payload.tensors
        self._warm = {
            k: t for k, t in payload.tensors.items() if has_clusters and part_of(k) in wanted
        }
        self._warm_tokens = payload.shape[2]

    def warm_start(self, tokens: int) -> WarmStart | None:
        """What the previous span left; None (cold) where the length differs.

        BF16 centroids as they are, FP8 ones as new FP32.
        """
        if not self._warm or tokens != self._warm_tokens:
            return None
        return WarmStart(centroid_values(self._warm), self._warm.get("ids"))

    # --- reading ------------------------------------------------------------------------------

    def overlaps(self, ranges: Iterable[TokenRange]) -> Iterator[tuple[Segment, int, int]]:
        """(segment, start, end) for every overlap of a segment with `ranges`, in read order."""
        for start, end in ranges:
            for segment in self.segments:
                low, high = max(start, segment.start), min(end, segment.end)
                if low < high:
                    yield segment, low, high

    def read_into(self, out: Tensor, ranges: Iterable[TokenRange]) -> int:
        """Write the tokens of `ranges` into the front of `out` (store layout); returns how many.

        Dense segments are copied and packed ones decoded straight into their place: one pass, no
        intermediate tensor of the window.
        """
        cursor = 0
        for segment, low, high in self.overlaps(ranges):
            target = out.narrow(self.token_dim, cursor, high - low)
            first, last = low - segment.start, high - segment.start
            if isinstance(segment.data, Payload):
                segment.data.decoder()(None, self.heads_first(target), first, last)
            else:
                target.copy_(segment.data.narrow(self.token_dim, first, last - first))
            cursor += high - low
        return cursor

    # --- bytes --------------------------------------------------------------------------------

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by ledger part."""
        parts: dict[str, int] = {}
        for segment in self.segments:
            for name, nbytes in segment.parts.items():
                parts[name] = parts.get(name, 0) + nbytes
        for name, nbytes in self._orphaned.items():
            parts[name] = parts.get(name, 0) + nbytes
        return parts

    @property
    def nbytes(self) -> int:
        """Bytes of all storages that this store keeps alive."""
        held = sum(segment.nbytes for segment in self.segments)
        return held + sum(self._orphaned.values())

    @property
    def _orphaned(self) -> dict[str, int]:
        """Bytes, by part, of a warm start whose span has left the window."""
        parts: dict[str, int] = {}
        if not self._warm:
            return parts
        table = self._warm["centroids"]
        payloads = (segment.payload for segment in reversed(self.segments))
        if any(p is not None and p.tensors.get("centroids") is table for p in payloads):
            return parts
        for name, tensor in self._warm.items():
            parts[part_of(name)] = parts.get(part_of(name), 0) + nbytes_of(tensor)
        return parts
