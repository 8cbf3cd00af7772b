"""Collects what a comparison finished, turns it into rows, and keeps the files up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from steadykv.config import CacheConfig
from steadykv.errors import ConfigError, SteadyKVError
from steadykv.evaluation.aggregate import (
    RolloutRecord,
    paired_difference,
    summarise,
)
from steadykv.evaluation.protocol import FLOOR, FLOOR_FP32, FrameWindow, Protocol
from steadykv.evaluation.results import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    SCHEMA_VERSION,
    SHIFT_FILE,
    Row,
    write_json,
    write_metrics,
)
from steadykv.evaluation.resume import Progress
from steadykv.evaluation.rollouts import BatchCost, join_costs
from steadykv.evaluation.verdict import Judge
from steadykv.world.sampler import AttentionBackend

FP32 = {"world_dtype": "float32", "cache_dtype": "float32"}
"""What the FP32 floor does not share with the other rows."""


@dataclass(frozen=True)
class ComparisonResult:
    """Everything a comparison found.

    rows: one per method and the floor, as in ``metrics.json``. records: one per method, episode
    and seed. shift: what ``token_shift.json`` holds, None if not measured.
    videos: method -> uint8 [kept, T, H, W, 3] on the CPU; "bf16" is always there.
    """

    rows: list[Row]
    records: list[RolloutRecord]
    windows: tuple[FrameWindow, ...]
    shift: dict[str, Any] | None
    videos: dict[str, torch.Tensor]
    protocol: Protocol
    run: str = ""  # a name that no other run has

    def paired(self, method: str, against: str) -> dict[str, Any]:
        """Mean of method - against with intervals: see :func:`paired_difference`.

        Raises ConfigError for a method that was not run.
        """
        sides = []
        for name in (method, against):
            records = [record for record in self.records if record.method == name]
            if not records:
                known = ", ".join(dict.fromkeys(record.method for record in self.records))
                raise ConfigError(f"no rollout of {name!r}; expected one of {known}")
            sides.append(records)
        return paired_difference(
            sides[0],
            sides[1],
            self.windows,
            confidence=self.protocol.confidence,
            resamples=self.protocol.resamples,
        )


class ResultCollector:
    """Finished rollouts of a comparison, and the folder that mirrors them.

    protocol: for statistics. planned: rollouts per method in a complete run. configs: cache of each
    method (``reference`` for the floor). shared: configuration fields that all rows have.
    folder: where files go, None for nowhere. progress: what was finished before, and goes on here.
    """

    def __init__(
        self,
        protocol: Protocol,
        windows: tuple[FrameWindow, ...],
        planned: int,
        configs: Mapping[str, CacheConfig],
        reference: CacheConfig,
        shared: Mapping[str, Any],
        environment: Mapping[str, Any],
        folder: Path | None,
        progress: Progress,
    ) -> None:
        self.protocol, self.windows, self.planned = protocol, windows, planned
        self.configs, self.reference = configs, reference
        self.shared, self.environment, self.folder = shared, environment, folder
        self.records: dict[str, list[RolloutRecord]] = {}
        self.costs: dict[str, list[BatchCost]] = {}
        self.progress = progress

    def restore(self, batches: Sequence[Sequence[RolloutRecord]]) -> None:
        """Take the rollouts of the batches that the progress lists, without writing anything."""
        for (method, _, cost), records in zip(self.progress.batches, batches, strict=True):
            self._take(method, records, cost)

    def add(
        self, method: str, first: int, records: Sequence[RolloutRecord], cost: BatchCost
    ) -> None:
        """Take a finished batch, whose first rollout is number ``first``; rewrite the files.

        ``progress.json`` comes last: what it lists is in the others.
        """
        self._take(method, records, cost)
        self.progress.batches.append((method, first, cost))
        if self.folder is not None:
            write_json(self.folder / ROLLOUTS_FILE, [r.to_dict() for r in self.all_records()])
            write_metrics(self.folder, self.rows())
            self.progress.write(self.folder)

    def _take(self, method: str, records: Sequence[RolloutRecord], cost: BatchCost) -> None:
        self.records.setdefault(method, []).extend(records)
        self.costs.setdefault(method, []).append(cost)

    def add_shift(self, shift: Mapping[str, Any]) -> None:
        """Write ``token_shift.json``."""
        if self.folder is not None:
            write_json(self.folder / SHIFT_FILE, dict(shift))

    def all_records(self) -> list[RolloutRecord]:
        """Records of all methods, method by method."""
        return [record for records in self.records.values() for record in records]

    def rows(self) -> list[Row]:
        """One row per method that finished a batch, in the order in which they first did."""
        judge = Judge(
            self.records,
            self.windows,
            confidence=self.protocol.confidence,
            resamples=self.protocol.resamples,
        )
        return [self._row(method, records, judge) for method, records in self.records.items()]

    def _row(self, method: str, records: Sequence[RolloutRecord], judge: Judge) -> Row:
        config = self.configs.get(method, self.reference)
        cost = join_costs(config, self.costs[method])
        summary = summarise(
            records,
            self.windows,
            confidence=self.protocol.confidence,
            resamples=self.protocol.resamples,
        )
        return {
            "version": SCHEMA_VERSION,
            "method": method,
            **asdict(cost),
            **summary,
            "paired": self._paired(method, records, judge),
            "better_than": judge.better_than(method),
            "planned_rollouts": self.planned,
            "configuration": {
                "cache": config.to_dict(),
                "attention": attention_of(method),
                **self.shared,
                **self._dropped(method),
                **(FP32 if method == FLOOR_FP32 else {}),
            },
            "environment": dict(self.environment),
        }

    def _dropped(self, method: str) -> dict[str, int]:
        """Tokens a layer that left the window unpacked in a rollout, if any did."""
        most = max(cost.dropped_dense_tokens for cost in self.costs[method])
        return {"dropped_dense_tokens": most} if most else {}

    def _paired(
        self, method: str, records: Sequence[RolloutRecord], judge: Judge
    ) -> dict[str, Any] | None:
        against = self.protocol.paired_against
        if against is None or against == method or against not in self.records:
            return None
        differences = paired_difference(
            records,
            self.records[against],
            self.windows,
            confidence=self.protocol.confidence,
            resamples=self.protocol.resamples,
        )
        return {"against": against, **judge.told(method, against, differences)}


def attention_of(method: str) -> AttentionBackend:
    """The attention implementation of a method's rollouts: one floor is BF16 with another."""
    return "math" if method == FLOOR else "sdpa"


def dtype_of(method: str) -> torch.dtype:
    """What the cache of a method's rollouts holds before it packs."""
    return torch.float32 if method == FLOOR_FP32 else torch.bfloat16


def result_folder(path: str | Path) -> Path:
    """The folder, made if absent.

    Raises ConfigError if it already holds results and SteadyKVError if it cannot be made.
    """
    folder = Path(path)
    if (folder / METRICS_FILE).exists():
        raise ConfigError(
            f"{folder} already holds {METRICS_FILE}; expected a new folder, or resume"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SteadyKVError(
            f"could not make the folder {folder}: {error.strerror or error}; choose another"
        ) from error
    return folder
