"""Packs captured spans with one method as a cache would: warm starts, known statistics, timed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from steadykv.cache.segments import part_of
from steadykv.capture import SpanTensors
from steadykv.codecs import Calibration, Payload, QueryMoment, SpanKey, encode
from steadykv.config import CacheConfig, CodecConfig

SIDES = ("keys", "values")


@dataclass(frozen=True)
class PackedSide:
    """Keys or values of one span: its payload and what it decodes to, in the original's dtype."""

    payload: Payload
    decoded: torch.Tensor
    encode_ms: float
    decode_ms: float
    is_warm: bool

    def bits_by_part(self) -> Mapping[str, float]:
        """Bits per element by part of the ledger; they add up to `payload.bits_per_element`."""
        elements = self.decoded.numel()
        bits: dict[str, float] = {}
        for name, nbytes in self.payload.nbytes_by_part().items():
            part = part_of(name)
            bits[part] = bits.get(part, 0.0) + 8 * nbytes / elements
        return bits


class SpanPacker:
    """One method along the spans of a layer: each starts from the centroids of the one before.

    As in `LayerCache`, the keys alone get query statistics, a first span has none (unless its codec
    says `first_span="own"`), and a warm start needs the span directly before, of equal length.
    calibration: used where a codec asks for one.
    """

    def __init__(self, config: CacheConfig, calibration: Calibration | None = None) -> None:
        self.config, self.calibration = config, calibration
        self._before: tuple[int, int] | None = None
        self._payloads: dict[str, Payload] = {}
        self._is_warmed_up = False

    def pack(self, span: SpanTensors) -> dict[str, PackedSide]:
        """Keys and values of one cell; the first call runs twice, so that no time holds a start."""
        if self._before != (span.layer, span.span - 1):
            self._payloads = {}
        if not self._is_warmed_up:
            self._both(span)
            self._is_warmed_up = True
        packed = self._both(span)
        self._before = span.layer, span.span
        self._payloads = {side: packed[side].payload for side in SIDES}
        return packed

    def statistics(self, span: SpanTensors) -> QueryMoment | None:
        """What the key codec is given for this span."""
        keys = self.config.keys
        if not keys.needs_queries or (span.has_own_statistics and keys.first_span != "own"):
            return None
        return span.moment

    def _both(self, span: SpanTensors) -> dict[str, PackedSide]:
        config = self.config
        return {
            "keys": self._side(span, "keys", span.k, config.keys, self.statistics(span)),
            "values": self._side(span, "values", span.v, config.values, None),
        }

    def _side(
        self,
        span: SpanTensors,
        side: str,
        x: torch.Tensor,
        codec: CodecConfig,
        stats: QueryMoment | None,
    ) -> PackedSide:
        before = self._payloads.get(side)
        is_warm = (
            bool(codec.warm_start)
            and before is not None
            and before.centroids is not None
            and before.shape == tuple(x.shape)
        )
        key = SpanKey(span.layer, side.removesuffix("s"), span.span)
        started = _now(x.device)
        payload = encode(
            x,
            codec,
            stats=stats,
            warm=before if is_warm else None,
            span_key=key,
            calibration=self.calibration if codec.needs_calibration else None,
        )
        encoded = _now(x.device)
        decoded = payload.decode(dtype=x.dtype)
        finished = _now(x.device)
        times = 1000 * (encoded - started), 1000 * (finished - encoded)
        return PackedSide(payload, decoded, *times, is_warm)


def _now(device: torch.device) -> float:
    """Seconds, once everything on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
