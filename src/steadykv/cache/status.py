"""What a layer says about itself: its bytes, and which tokens are packed, which not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from steadykv.cache.ledger import LayerLedger
from steadykv.cache.segments import Segment, TensorStore, nbytes_of

if TYPE_CHECKING:
    from steadykv.cache.layer import LayerCache

__all__ = ["LayerStatus", "SegmentStatus", "layer_ledger", "layer_status"]

PACKED, DENSE, FREED = "packed", "dense", "freed"


@dataclass(frozen=True)
class SegmentStatus:
    """Tokens [start, end). keys, values: "packed", "dense", or "freed" (only that side left).

    reason: why a dense side is dense; empty where both are packed.
    """

    start: int
    end: int
    keys: str
    values: str
    reason: str

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def is_packed(self) -> bool:
        """Whether at least one side is packed."""
        return PACKED in (self.keys, self.values)


@dataclass(frozen=True)
class LayerStatus:
    """One layer. Tokens are held tokens; a token with one packed side counts as packed.

    attended_tokens: held tokens that `read` returns. encoded_tokens: tokens encoded since the last
    reset, each once. dropped_dense_tokens: tokens that left the window while they waited for their
    span.
    """

    layer: int
    packed_tokens: int
    dense_tokens: int
    attended_tokens: int
    encoded_tokens: int
    dropped_dense_tokens: int
    segments: tuple[SegmentStatus, ...]

    def __str__(self) -> str:
        lines = [
            f"layer {self.layer}: {self.packed_tokens} tokens packed, {self.dense_tokens} dense, "
            f"{self.attended_tokens} attended"
        ]
        for segment in self.segments:
            forms = f"keys {segment.keys}, values {segment.values}"
            why = f" ({segment.reason})" if segment.reason else ""
            lines.append(f"  {segment.start}-{segment.end}: {forms}{why}")
        return "\n".join(lines)


def layer_status(layer: LayerCache) -> LayerStatus:
    """Host integers only; nothing is read from the device."""
    segments = tuple(_segments(layer))
    packed = sum(segment.tokens for segment in segments if segment.is_packed)
    held = sum(segment.tokens for segment in segments)
    return LayerStatus(
        layer=layer.layer,
        packed_tokens=packed,
        dense_tokens=held - packed,
        attended_tokens=sum(end - start for start, end in layer.spans()),
        encoded_tokens=layer.encoded_tokens,
        dropped_dense_tokens=layer.dropped_dense_tokens,
        segments=segments,
    )


def layer_ledger(layer: LayerCache) -> LayerLedger:
    """Bytes by part, and the numbers that bits and compression are made of."""
    parts = dict(layer.keys.parts)
    for name, nbytes in layer.values.parts.items():
        parts[name] = parts.get(name, 0) + nbytes
    if layer.stats is not None:
        parts["query_moment"] = layer.stats.nbytes
    if layer.calibration is not None:
        parts["calibration"] = layer.calibration.nbytes
    parts["counters"] = parts.get("counters", 0) + nbytes_of(layer.nonfinite_count)
    parts = {name: nbytes for name, nbytes in sorted(parts.items()) if nbytes}
    status = layer_status(layer)
    batch = layer.batch or 0
    dense_bits = 8 * layer.geometry.dtype.itemsize
    packed_bits = packed_elements = 0
    for store in (layer.keys, layer.values):
        elements = layer.geometry.elements(batch, status.packed_tokens)
        payloads = [segment for segment in store.segments if segment.payload is not None]
        own = sum(layer.geometry.elements(batch, segment.tokens) for segment in payloads)
        packed_bits += sum(8 * s.payload.nbytes for s in payloads if s.payload is not None)
        packed_bits += dense_bits * (elements - own)
        packed_elements += elements
    return LayerLedger(
        layer=layer.layer,
        parts=parts,
        packed_tokens=status.packed_tokens,
        dense_tokens=status.dense_tokens,
        attended_tokens=status.attended_tokens,
        packed_bits=packed_bits,
        packed_elements=packed_elements,
        attended_elements=2 * layer.geometry.elements(batch, status.attended_tokens),
        dense_element_bits=dense_bits,
    )


def _segments(layer: LayerCache) -> Iterator[SegmentStatus]:
    """Ranges between neighbouring segment borders of either tensor."""
    stores = (layer.keys, layer.values)
    cuts = sorted({cut for store in stores for s in store.segments for cut in (s.start, s.end)})
    for start, end in pairwise(cuts):
        key, value = (_holding(store, start) for store in stores)
        if key is None and value is None:
            continue  # between the sink and the window
        forms = [_form(segment) for segment in (key, value)]
        reasons = {_reason(layer, segment) for segment in (key, value)} - {""}
        yield SegmentStatus(start, end, forms[0], forms[1], "; ".join(sorted(reasons)))


def _holding(store: TensorStore, token: int) -> Segment | None:
    return next((s for s in store.segments if s.start <= token < s.end), None)


def _form(segment: Segment | None) -> str:
    if segment is None:
        return FREED
    return DENSE if segment.payload is None else PACKED


def _reason(layer: LayerCache, segment: Segment | None) -> str:
    if segment is None or segment.payload is not None:
        return ""
    if segment.role == "open":
        return "open chunk"
    return segment.reason or layer.waiting_reason(segment.start)
