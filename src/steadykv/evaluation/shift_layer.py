"""One layer of a shift probe: follows the caches and compares selections, all on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from steadykv.cache import LayerCache
from steadykv.cache.policy import TokenRange
from steadykv.evaluation.metrics.selection import key_logits, shared_keys, top_keys
from steadykv.evaluation.packed_keys import PackedKeys, take_ranges
from steadykv.evaluation.protocol import TOP_K, ShiftOptions
from steadykv.evaluation.shadows import DENOISING, Rotation, ShadowLayer
from steadykv.evaluation.shift_example import ExampleRecorder


@dataclass(frozen=True)
class _Selection:
    """What queries select under BF16 among the tokens of some ranges.

    best: indices [B, Hq, Q, k]. tokens: index -> token position [N]. certainty: see the recorder.
    """

    best: torch.Tensor
    tokens: torch.Tensor
    certainty: torch.Tensor | None


class ProbeLayer(ShadowLayer):
    """Compares, in every measured pass, the packed keys that queries select.

    counts: measures are moved best keys and lost shares of the best. recorder: where the shown
    query is kept, or None. Everything else is a `ShadowLayer`'s.
    """

    def __init__(
        self,
        index: int,
        reference: LayerCache,
        shadows: Mapping[str, LayerCache],
        options: ShiftOptions,
        token_dim: int,
        recorder: ExampleRecorder | None,
        rotation: Rotation | None = None,
    ) -> None:
        super().__init__(index, reference, shadows, options.query_stride, token_dim, rotation)
        self.options = options
        self.recorder = recorder
        self.by_step: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}
        """(shadow, denoising step) -> moved best keys FP64 [], compared queries of one head."""
        self._candidate: torch.Tensor | None = None
        self._forget()

    def _forget(self) -> None:
        self._chunks_seen = 0
        self._packed = {name: PackedKeys() for name in self.shadows}

    def restart(self) -> None:
        """Start a new rollout; what was measured so far is kept."""
        super().restart()
        self._forget()

    def close_pass(self, kind: int) -> None:
        """Count the pass that just ended, now that its kind is known."""
        if kind == DENOISING:
            for name, (counts, queries) in self._pending.items():
                moved, compared = self.by_step.get((name, self._step), (counts.new_zeros(()), 0))
                self.by_step[name, self._step] = moved + counts[0].sum(), compared + queries
            if self._candidate is not None and self.recorder is not None:
                self.recorder.keep(self._candidate)
        self._candidate = None
        super().close_pass(kind)

    def _written(self, name: str, layer: LayerCache) -> None:
        self._packed[name].update(layer)

    def _is_due(self, start: int) -> bool:
        is_packed = any(packed.ranges for packed in self._packed.values())
        is_due = is_packed and self._chunks_seen % self.options.chunk_stride == 0
        self._chunks_seen += is_packed
        return is_due

    def _measure(self, queries: torch.Tensor, start: int) -> None:
        """Compare what queries [B, Hq, Q, D] of the chunk at ``start`` select.

        Per packed range set (one, unless policies differ) and shadow, allocates FP32 logits
        [B, Hq, Q, N] for the N packed tokens in the window.
        """
        recorder = self.recorder
        reference = self._heads_first(self.reference.read()[0])
        attended = self.reference.spans()
        before: dict[tuple[TokenRange, ...], _Selection] = {}
        positions: dict[str, torch.Tensor] = {}
        for name, packed in self._packed.items():
            ranges = packed.ranges
            if not ranges:
                continue
            if ranges not in before:
                original = self._rotated(take_ranges(reference, attended, ranges), ranges)
                before[ranges] = self._select(queries, original, ranges)
            best = before[ranges].best
            after = top_keys(key_logits(queries, self._rotated(packed.keys(), ranges)), TOP_K)
            moved = (after[..., 0] != best[..., 0]).double()
            lost = 1.0 - shared_keys(best, after).double() / best.shape[-1]
            counts = torch.stack((moved.sum(dim=-1), lost.sum(dim=-1)))
            self._pending[name] = counts, queries.shape[2]
            positions[name] = before[ranges].tokens[after[..., 0]]
        if recorder is None:
            return
        contrast = {self._packed[name].ranges for name in recorder.contrast}
        if len(contrast) == 1 and (shared := contrast.pop()):
            chosen = before[shared]
            assert chosen.certainty is not None, "a recorder is there"
            self._candidate = recorder.candidate(
                chosen.tokens[chosen.best[..., 0]],
                positions,
                chosen.certainty,
                first_query=start,
                query_stride=self.query_stride,
                layer=self.index,
                step=self._step,
            )

    def _select(
        self, queries: torch.Tensor, keys: torch.Tensor, ranges: tuple[TokenRange, ...]
    ) -> _Selection:
        logits = key_logits(queries, keys)
        certainty = None
        if self.recorder is not None:
            certainty = self.recorder.certainty(logits, queries.shape[-1])
        tokens = torch.cat([torch.arange(*span, device=keys.device) for span in ranges])
        return _Selection(top_keys(logits, TOP_K), tokens, certainty)
