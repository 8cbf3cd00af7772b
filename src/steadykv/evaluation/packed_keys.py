"""The packed part of one layer's window as keys: what each shadow cache gives back for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from steadykv.cache import LayerCache
from steadykv.cache.policy import TokenRange
from steadykv.codecs import Payload


class PackedKeys:
    """Decoded keys of the packed spans that one layer of one cache holds, BF16 [B, H, S, D] each.

    A span is encoded once, so it is decoded once as well, and once more when its refinement goes;
    its keys are released when the cache has let go of it.
    """

    def __init__(self) -> None:
        self._decoded: dict[TokenRange, torch.Tensor] = {}
        self._payloads: dict[TokenRange, Payload] = {}
        self.ranges: tuple[TokenRange, ...] = ()
        """Packed tokens inside the window, ascending and disjoint."""

    def update(self, layer: LayerCache) -> None:
        """Follow the cache after a write."""
        payloads = {
            (segment.start, segment.end): segment.payload
            for segment in layer.keys.segments
            if segment.payload is not None
        }
        self._decoded = {
            span: self._decoded[span] if self._payloads.get(span) is payload else payload.decode()
            for span, payload in payloads.items()
        }
        self._payloads = payloads
        self.ranges = tuple(
            (max(start, low), min(end, high))
            for start, end in sorted(payloads)
            for low, high in layer.spans()
            if max(start, low) < min(end, high)
        )

    def keys(self) -> torch.Tensor:
        """BF16 [B, H, N, D] of the tokens of ``ranges`` (at least one), allocated here."""
        return torch.cat(
            [
                keys[:, :, low - start : high - start]
                for (start, end), keys in sorted(self._decoded.items())
                for low, high in self.ranges
                if start <= low and high <= end
            ],
            dim=2,
        )


def take_ranges(
    keys: torch.Tensor, attended: Sequence[TokenRange], ranges: Iterable[TokenRange]
) -> torch.Tensor:
    """Rows of ``ranges`` from keys [B, H, N, D] that a read returned for the ranges ``attended``.

    Every one of ``ranges`` lies within one attended range. Returns BF16 [B, H, M, D], a copy.
    """
    rows = []
    for low, high in ranges:
        cursor = 0
        for start, end in attended:
            if start <= low and high <= end:
                first = cursor + low - start
                rows.append(keys[:, :, first : first + high - low])
            cursor += end - start
    return torch.cat(rows, dim=2).bfloat16()
