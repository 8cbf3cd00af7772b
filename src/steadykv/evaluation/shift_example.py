"""One query worth showing: far off under one method, unmoved under another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from steadykv.errors import ConfigError

HOW_CHOSEN = (
    "a chosen example, not a typical query: among the sampled queries{unmoved}, it has the largest "
    "attention weight times distance by which {moving} moves the choice"
)
UNMOVED = " whose choice {steady} leaves unchanged (as far as there are any)"
# Layout of a record, before one position per shadow.
SCORE, CERTAINTY, ROW, LAYER, HEAD, STEP, QUERY, REFERENCE, SHADOWS = range(9)


@dataclass(frozen=True)
class TokenPlace:
    """A token's frame and its patch in that frame, all counted from 0."""

    token: int
    frame: int
    patch_row: int
    patch_column: int


@dataclass
class ExampleRecorder:
    """Keeps the best example seen so far on the device, without a host transfer.

    shadows: names in the order in which selections are recorded. moving, steady: (method, its
    shadow); steady is None when no second method has packed keys. rows: only the first so many
    rollouts of the batch are considered. Raises ConfigError when patches do not fill a frame.
    """

    shadows: tuple[str, ...]
    moving: tuple[str, str]
    steady: tuple[str, str] | None
    frame_tokens: int
    patch_columns: int
    rows: int
    best: torch.Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.patch_columns < 1 or self.frame_tokens % self.patch_columns:
            raise ConfigError(
                f"patch_columns is {self.patch_columns}; expected a divisor of the frame's "
                f"{self.frame_tokens} tokens"
            )

    @property
    def contrast(self) -> set[str]:
        """Shadows that an example has to be measured in, over the same packed tokens."""
        return {self.moving[1]} | ({self.steady[1]} if self.steady else set())

    def certainty(self, logits: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Attention weight [rows, Hq, Q] of the best packed key among the packed ones."""
        scaled = logits[: self.rows] / math.sqrt(head_dim)
        return torch.exp(scaled.amax(dim=-1) - scaled.logsumexp(dim=-1))

    def candidate(
        self,
        reference: torch.Tensor,
        selected: Mapping[str, torch.Tensor],
        certainty: torch.Tensor,
        first_query: int,
        query_stride: int,
        layer: int,
        step: int,
    ) -> torch.Tensor:
        """Record FP64 [8 + shadows] of this pass's best example.

        ``reference`` and every ``selected`` hold token positions [B, Hq, Q]; a shadow that has
        nothing packed yet is absent and recorded as -1.
        """
        places = {name: value[: self.rows] for name, value in selected.items()}
        origin = reference[: self.rows]
        moved = self._distance(places[self.moving[1]], origin)
        drift = torch.zeros_like(moved)
        if self.steady is not None:
            drift = self._distance(places[self.steady[1]], origin)
        # An unmoved steady method scores in 0..2; any drift of it puts the query below all those.
        score = certainty * moved - torch.where(drift > 0, 4.0 + drift, 0.0)
        flat = score.flatten().argmax()
        heads, count = score.shape[1:]
        query = first_query + (flat % count) * query_stride
        # take() keeps the index on the device; indexing with a scalar tensor would read it back.
        chosen = [
            score.take(flat),
            certainty.take(flat),
            flat // (heads * count),
            torch.full_like(flat, layer),
            flat // count % heads,
            torch.full_like(flat, step),
            query,
            origin.take(flat),
        ]
        for name in self.shadows:
            place = places.get(name)
            chosen.append(torch.full_like(flat, -1) if place is None else place.take(flat))
        return torch.stack([value.double() for value in chosen])

    def _distance(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """0 for the same token; 1 for the frame's diagonal, plus up to 1 for frames apart."""
        rows = self.frame_tokens // self.patch_columns
        down = first % self.frame_tokens // self.patch_columns
        down = down - second % self.frame_tokens // self.patch_columns
        across = first % self.patch_columns - second % self.patch_columns
        apart = first // self.frame_tokens - second // self.frame_tokens
        return torch.hypot(down.float(), across.float()) / math.hypot(
            rows, self.patch_columns
        ) + apart.abs().float().div(8).clamp(max=1)

    def keep(self, record: torch.Tensor) -> None:
        """Keep ``record`` if it beats the best one."""
        if self.best is None:
            self.best = record
        else:
            self.best = torch.where(record[SCORE] > self.best[SCORE], record, self.best)

    def place(self, token: int) -> TokenPlace:
        """Frame and patch of a token position."""
        patch = token % self.frame_tokens
        return TokenPlace(
            token,
            token // self.frame_tokens,
            patch // self.patch_columns,
            patch % self.patch_columns,
        )

    def describe(self, shadow_of: Mapping[str, str | None]) -> dict[str, Any] | None:
        """The kept example, JSON-able; None when nothing was measured. Copies to the host."""
        if self.best is None:
            return None
        record = self.best.tolist()
        positions = dict(zip(self.shadows, map(int, record[SHADOWS:]), strict=True))
        chosen = {"bf16": int(record[REFERENCE])}
        for method, shadow in shadow_of.items():
            chosen[method] = chosen["bf16"] if shadow is None else positions[shadow]
        steady = self.steady[0] if self.steady else None
        unmoved = UNMOVED.format(steady=steady) if steady else ""
        return {
            "chosen": HOW_CHOSEN.format(moving=self.moving[0], unmoved=unmoved),
            "moving": self.moving[0],
            "steady": steady,
            "row": int(record[ROW]),
            "layer": int(record[LAYER]),
            "head": int(record[HEAD]),
            "step": int(record[STEP]),
            "attention_weight": record[CERTAINTY],
            "query": vars(self.place(int(record[QUERY]))),
            "selected": {
                method: None if token < 0 else vars(self.place(token))
                for method, token in chosen.items()
            },
        }
