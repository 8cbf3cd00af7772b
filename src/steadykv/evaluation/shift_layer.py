"""One layer of a shift probe: follows the caches and compares selections, all on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from steadykv.cache import LayerCache
from steadykv.cache.policy import TokenRange
from steadykv.capture import rotate_pairs
from steadykv.errors import PositionError
from steadykv.evaluation.metrics.selection import key_logits, shared_keys, top_keys
from steadykv.evaluation.packed_keys import PackedKeys, take_ranges
from steadykv.evaluation.protocol import TOP_K, ShiftOptions
from steadykv.evaluation.shift_example import ExampleRecorder

DENOISING, CLEAN = 0, 1
"""Kinds of pass. The clean one is the last before its chunk is committed."""

Rotation = Callable[[int, int], torch.Tensor]
"""Rotary embedding of the tokens start..end: FP32 cosines and sines [2, S, D/2]."""


@dataclass(frozen=True)
class _Selection:
    """What queries select under BF16 among the tokens of some ranges.

    best: indices [B, Hq, Q, k]. tokens: index -> token position [N]. certainty: see the recorder.
    """

    best: torch.Tensor
    tokens: torch.Tensor
    certainty: torch.Tensor | None


class ProbeLayer:
    """What the model sees of one layer: write, observe_queries, read, as of a `LayerCache`.

    reference: the BF16 layer that answers reads. shadows: name -> layer fed with the same tensors.
    token_dim: 1 for the layout BSHD, 2 for BHSD. recorder: where the shown query is kept, or None.
    rotation: what a host that stores keys before their rotary embedding does to them, and to its
    queries, before it attends; selections are compared after it.
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
        self.index = index
        self._rotation = rotation
        self.reference = reference
        self.shadows = dict(shadows)
        self.options = options
        self.recorder = recorder
        self.counts: torch.Tensor | None = None
        """FP64 [shadow, kind of pass, measure, B, Hq]: moved best keys, lost shares of the best."""
        self.queries = {name: [0, 0] for name in self.shadows}
        """Compared queries per head, by kind of pass: host integers, known from shapes."""
        self.by_step: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}
        """(shadow, denoising step) -> moved best keys FP64 [], compared queries of one head."""
        self.rollouts = 0
        """Rows of the batch, known from the first write on."""
        self._token_dim = token_dim
        self._pending: dict[str, tuple[torch.Tensor, int]] = {}
        self._candidate: torch.Tensor | None = None
        self.restart()

    def restart(self) -> None:
        """Start a new rollout; what was measured so far is kept."""
        self.close_pass(DENOISING)
        self._start: int | None = None
        self._step = 0
        self._chunks_seen = 0
        self._is_measured = False
        self._packed = {name: PackedKeys() for name in self.shadows}

    # --- what the model calls ---------------------------------------------------------------

    def write(self, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Write to the reference and to every shadow; errors as of `LayerCache.write`."""
        self.reference.write(k, v, start)
        self.rollouts = k.shape[0]
        for name, layer in self.shadows.items():
            layer.write(k, v, start)
            self._packed[name].update(layer)
        is_same_chunk = start == self._start
        self.close_pass(DENOISING if is_same_chunk else CLEAN)
        if is_same_chunk:
            self._step += 1
            return
        self._start, self._step = start, 0
        is_packed = any(packed.ranges for packed in self._packed.values())
        self._is_measured = is_packed and self._chunks_seen % self.options.chunk_stride == 0
        self._chunks_seen += is_packed

    def observe_queries(self, q: torch.Tensor) -> None:
        """Feed every shadow's statistics and, in measured chunks, compare selections."""
        if self._start is None:
            raise PositionError(
                f"layer {self.index} has no open chunk; expected write() before observe_queries()"
            )
        for layer in self.shadows.values():
            layer.observe_queries(q)
        if self._is_measured:
            heads_first = q if self._token_dim == 2 else q.transpose(1, 2)
            self._measure(heads_first[:, :, :: self.options.query_stride], self._start)

    def read(
        self, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The reference's keys and values: the model goes on as if nothing were quantized."""
        return self.reference.read(out=out)

    def spans(self) -> list[TokenRange]:
        """Token ranges that `read` returns, in its order."""
        return self.reference.spans()

    # --- measuring --------------------------------------------------------------------------

    def close_chunk(self) -> None:
        """The open chunk is being committed: its last pass was the clean one."""
        self.close_pass(CLEAN)
        self._start = None

    def close_pass(self, kind: int) -> None:
        """Count the pass that just ended, now that its kind is known."""
        for place, name in enumerate(self.shadows):
            if name not in self._pending:
                continue
            counts, queries = self._pending[name]
            if self.counts is None:
                self.counts = counts.new_zeros((len(self.shadows), 2, *counts.shape))
            self.counts[place, kind] += counts
            self.queries[name][kind] += queries
            if kind == DENOISING:
                moved, compared = self.by_step.get((name, self._step), (counts.new_zeros(()), 0))
                self.by_step[name, self._step] = moved + counts[0].sum(), compared + queries
        self._pending = {}
        if self._candidate is not None and kind == DENOISING and self.recorder is not None:
            self.recorder.keep(self._candidate)
        self._candidate = None

    def _measure(self, queries: torch.Tensor, start: int) -> None:
        """Compare what queries [B, Hq, Q, D] of the chunk at ``start`` select.

        Per packed range set (one, unless policies differ) and shadow, allocates FP32 logits
        [B, Hq, Q, N] for the N packed tokens in the window.
        """
        recorder, stride = self.recorder, self.options.query_stride
        if self._rotation is not None:
            rope = self._rotation(start, start + stride * queries.shape[2])
            queries = rotate_pairs(queries, rope[:, ::stride])
        keys, _ = self.reference.read()
        reference = keys if self._token_dim == 2 else keys.transpose(1, 2)
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
                query_stride=stride,
                layer=self.index,
                step=self._step,
            )

    def _rotated(self, x: torch.Tensor, ranges: Iterable[TokenRange]) -> torch.Tensor:
        """x [B, H, N, D] of the tokens of `ranges` as the host's attention sees it."""
        if self._rotation is None:
            return x
        return rotate_pairs(x, torch.cat([self._rotation(*tokens) for tokens in ranges], dim=1))

    def _select(
        self, queries: torch.Tensor, keys: torch.Tensor, ranges: tuple[TokenRange, ...]
    ) -> _Selection:
        logits = key_logits(queries, keys)
        certainty = None
        if self.recorder is not None:
            certainty = self.recorder.certainty(logits, queries.shape[-1])
        tokens = torch.cat([torch.arange(*span, device=keys.device) for span in ranges])
        return _Selection(top_keys(logits, TOP_K), tokens, certainty)
