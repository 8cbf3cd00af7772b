"""Rollouts of the moments of memory_walks.py with any cache, and their rows."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.memory_walks import Moment, load_moments
from benchmarks.memory_windows import planned_bytes
from steadykv.config import CacheConfig
from steadykv.evaluation.aggregate import capped_psnr
from steadykv.evaluation.metrics import frame_mse
from steadykv.evaluation.metrics.lpips import lpips_by_frame
from steadykv.evaluation.protocol import FLOOR
from steadykv.evaluation.provenance import environment
from steadykv.evaluation.rollouts import BatchCost, run_batch, warm_up
from steadykv.world import WorldModel
from steadykv.world.sampler import AttentionBackend

SEEN, LAST = "true:seen", "true:last"


@dataclass(frozen=True)
class Setting:
    """A method and its window; `budget` is the BF16 window whose bytes it may cost, if any."""

    method: str
    window: int
    config: CacheConfig
    budget: int | None = None


def attention_of(setting: Setting) -> AttentionBackend:
    """The noise floor is BF16 with another implementation."""
    return "math" if setting.method == FLOOR else "sdpa"


def measured(
    moments: Sequence[Moment], true: torch.Tensor, made: torch.Tensor, device: torch.device
) -> Iterator[dict[str, float]]:
    """PSNR and LPIPS of each moment's returning frames; both uint8 [B, G, H, W, 3]."""
    mse = frame_mse(true, made).cpu().numpy()
    batch = 8 if device.type == "cpu" else 128
    distance = lpips_by_frame(true.to(device), made.to(device), batch=batch).cpu().numpy()
    for number, one in enumerate(moments):
        chosen = np.array(one.frames) - one.start
        psnr = capped_psnr(mse[number, chosen].mean())
        yield {"psnr": float(psnr), "lpips": float(distance[number, chosen].mean())}


def copies(moments: Sequence[Moment], true: torch.Tensor, method: str) -> torch.Tensor:
    """[B, G, H, W, 3]: true frames that take the place of generated ones, as `method` says."""
    prime = moments[0].prime
    made = true[:, prime:].clone()
    for number, one in enumerate(moments):
        for frame, seen in zip(one.frames, one.seen, strict=True):
            source = seen - one.start + prime if method == SEEN else prime - 1
            made[number, frame - one.start] = true[number, source]
    return made


class Rollouts(ABC):
    """The rollouts of moments with any setting, a batch at a time."""

    def __init__(
        self, world: WorldModel, moments: Sequence[Moment], given: argparse.Namespace
    ) -> None:
        self.world, self.given = world, given
        self.device = next(world.parameters()).device
        self.episodes, self.true = load_moments(moments, given.frames)
        if given.camera == "poses":
            self.episodes = self.episodes.with_camera()
        self.moments = moments
        self.plan = [(row, seed) for seed in given.seeds for row in range(len(moments))]
        facts = environment(self.device)
        self.shared = {
            "prime": given.prime, "generated": given.frames, "span_chunks": given.span_chunks,
            "world": given.world, "camera": given.camera, "torch": facts["torch"],
            "device": facts["device"], "commit": facts["commit"],
        }  # fmt: skip

    @abstractmethod
    def rows(self, setting: Setting) -> list[dict[str, Any]]:
        """What is measured of all rollouts."""

    def name_of(self, moment: Moment) -> str:
        """What the file of a kept video is named by."""
        return moment.name

    def batches(
        self, setting: Setting
    ) -> Iterator[tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor, dict[str, Any]]]:
        """Row and seed of each rollout, true and generated frames, and what one of them cost.

        Frames are uint8 [B, G, H, W, 3]. Prints what the ledger holds beside what was planned.
        """
        given = self.given
        for at in range(0, len(self.plan), given.batch):
            part = self.plan[at : at + given.batch]
            numbers = [row for row, _ in part]
            if at == 0 and self.device.type == "cuda":
                self._warm_up(setting)
            video, cost = self._roll_out(setting, numbers, [seed for _, seed in part])
            planned = planned_bytes(
                setting.config, self.world.config, given.prime + given.frames, len(part)
            )
            agrees = "as planned" if planned.end == cost.resident_bytes else "NOT AS PLANNED"
            print(
                f"{setting.method} with {setting.window} frames: rollouts {at + len(part)} of "
                f"{len(self.plan)}, {cost.seconds:.0f} s; the ledger holds "
                f"{cost.resident_bytes:,} bytes, planned {planned.end:,}: {agrees}",
                flush=True,
            )
            own = {
                "resident_bytes": round(cost.resident_bytes / len(part)),
                "planned_bytes": round(planned.end / len(part)),
                "planned_always": round(planned.always / len(part)),
                "bits_per_element": cost.bits_per_element,
                "seconds": cost.seconds / len(part),
            }
            self._keep(setting, part, video)
            yield part, self.true[numbers, given.prime :], video[:, given.prime :], own

    def _roll_out(
        self, setting: Setting, numbers: Sequence[int], seeds: Sequence[int]
    ) -> tuple[torch.Tensor, BatchCost]:
        return run_batch(
            self.world, self.episodes.select(numbers), seeds, setting.config,
            frames=self.given.frames,
            first_packed_frame=0,
            method=setting.method,
            attention=attention_of(setting),
        )  # fmt: skip

    def _warm_up(self, setting: Setting) -> None:
        """Kernels are compiled before seconds are counted."""
        chunk, attention = self.world.config.chunk_frames, attention_of(setting)
        warm_up(self.world, self.episodes, setting.config, frames=chunk, attention=attention)

    def _keep(self, setting: Setting, part: Sequence[tuple[int, int]], video: torch.Tensor) -> None:
        if self.given.videos is None:
            return
        self.given.videos.mkdir(parents=True, exist_ok=True)
        method = setting.method.replace(":", "+")
        for (row, seed), frames in zip(part, video, strict=True):
            name = f"{self.name_of(self.moments[row])}-{method}-{setting.window}-{seed}.npy"
            np.save(self.given.videos / name, frames.numpy())


class Bench(Rollouts):
    """Rollouts that return to a view."""

    def rows(self, setting: Setting) -> list[dict[str, Any]]:
        """One a moment and seed. Bytes are those of one rollout of a batch."""
        key, rows = (setting.method, setting.window, setting.budget), []
        for part, true, made, own in self.batches(setting):
            found = measured([self.moments[row] for row, _ in part], true, made, self.device)
            for (row, seed), quality in zip(part, found, strict=True):
                rows.append(self._row(key, self.moments[row], seed) | quality | own | self.shared)
        return rows

    def copied(self, method: str) -> list[dict[str, Any]]:
        """Rows of true frames in place of generated ones: no cache, so no bytes and no seconds."""
        made = copies(self.moments, self.true, method)
        found = list(measured(self.moments, self.true[:, self.given.prime :], made, self.device))
        nothing = dict.fromkeys(
            ("resident_bytes", "planned_bytes", "planned_always", "bits_per_element", "seconds"), 0
        )
        return [
            self._row((method, 0, None), self.moments[row], seed) | found[row] | nothing
            | self.shared
            for row, seed in self.plan
        ]  # fmt: skip

    def _row(self, key: tuple[str, int, int | None], one: Moment, seed: int) -> dict[str, Any]:
        method, window, budget = key
        chunk = self.world.config.chunk_frames
        ends = [one.start + (frame - one.start) // chunk * chunk + chunk for frame in one.frames]
        inside = [seen >= end - window for seen, end in zip(one.seen, ends, strict=True)]
        gaps = [frame - seen for frame, seen in zip(one.frames, one.seen, strict=True)]
        return {
            "walk": one.track.name, "start": one.start, "seed": seed, "method": method,
            "window": window, "budget_window": "" if budget is None else budget,
            "frames": " ".join(map(str, one.frames)), "gap": float(np.mean(gaps)),
            "away": round(one.away, 3),
            "seen_in_window": float(np.mean(inside)),
        }  # fmt: skip
