"""Turns the dense segments of one span into a payload, one tensor at a time."""

from __future__ import annotations

from steadykv.cache.ledger import MemoryMeter
from steadykv.cache.segments import Segment, TensorStore
from steadykv.cache.workspace import encode_workspace_nbytes
from steadykv.codecs import Calibration, QueryMoment, SpanKey, encode
from steadykv.config import CodecConfig

__all__ = ["DENSE_BITS", "pack_span"]

DENSE_BITS = 16
"""A span that would take this many bits per element, or more, stays dense (methods.md 1.7)."""


def pack_span(
    store: TensorStore,
    codec: CodecConfig,
    start: int,
    end: int,
    *,
    span_key: SpanKey,
    stats: QueryMoment | None,
    calibration: Calibration | None,
    meter: MemoryMeter,
) -> bool:
    """Encode the waiting segments of [start, end); False if they stay dense, as nothing is saved.

    stats: the moment to encode with, None for a cold start. calibration: for codecs that ask for
    one, and ignored by others. Allocates the joined source where there
    are several segments, `encode_workspace_nbytes`, and the payload. If encoding fails, the tokens
    are still there, dense.
    """
    waiting = store.within(start, end)
    shape = store.shape_of(waiting)
    bits = codec.bits_per_element(*shape, compensated=stats is not None)
    if bits >= DENSE_BITS:
        why = f"{store.name}s: {bits:.1f} bits per element predicted, not below {DENSE_BITS}"
        for old in waiting:
            store.replace([old], Segment(old.start, old.end, old.data, "dense", why))
        return False
    if len(waiting) > 1:
        meter.transient(sum(segment.nbytes for segment in waiting))
    del waiting
    source = store.join(start, end)
    payload = encode(
        store.heads_first(source.tensor),
        codec,
        stats=stats,
        warm=store.warm_start(shape[2]) if codec.warm_start else None,
        span_key=span_key,
        calibration=calibration if codec.needs_calibration else None,
    )
    packed = Segment(source.start, source.end, payload)
    workspace = encode_workspace_nbytes(codec, shape, stats is not None, source.tensor.device)
    meter.transient(packed.nbytes + workspace)
    store.replace([source], packed)
    if codec.warm_start:
        store.remember(payload, with_ids=codec.warm_start == "ids")
    return True
