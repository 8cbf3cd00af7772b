"""When a difference between two methods may be called one: the rule that every output follows.

A paired difference (method minus other, over the same walks and noise) says that the method is
**better** or **worse** in a measure only if

1. it comes from at least ``FEW_EPISODES`` episodes that both finished (of fewer, the bootstrap's
   intervals are too narrow to exclude anything),
2. its interval excludes zero: both bounds lie strictly on one side, and
3. the worse of the two is beyond the noise floor: *its* paired difference to the floor points away
   from BF16, and that interval excludes zero too. With several floors, it is beyond each.

Anything else is **not told apart**, with the reason. Rule 3 asks the worse one alone: a method at
the floor is better than one beyond it, but among two at the floor nothing can be ranked, however
narrow the interval. Where no floor was measured nothing is ranked either.

The token shift is measured on BF16's own trajectory, where BF16 has exactly 0 whatever computes its
attention: 0 is its floor, and rule 3 holds whenever rule 2 does.

docs/protocol.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from steadykv.evaluation.aggregate import RolloutRecord, Values, complete_grid, measures
from steadykv.evaluation.bootstrap import paired_interval
from steadykv.evaluation.protocol import FEW_EPISODES, FLOORS, FrameWindow

__all__ = ["Difference", "Judge", "Verdict", "Word", "direction", "judge"]

LOWER_IS_BETTER = ("flicker_error", "top1_shift", "top5_shift")
HIGHER_IS_BETTER = ("psnr", "ssim")
WITHOUT_FLOOR = ("top1_shift", "top5_shift")
"""Their floor is 0; see above."""


class Word(StrEnum):
    """What may be said of a method beside another one."""

    better = "better"
    worse = "worse"
    not_told_apart = "not told apart"


@dataclass(frozen=True)
class Difference:
    """Mean of (method - other) over shared rollouts; bounds are None with under two episodes."""

    mean: float
    low: float | None
    high: float | None
    episodes: int

    def excludes_zero(self) -> bool:
        """Whether both bounds lie strictly on the same side of zero."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class Verdict:
    """The word, and for "not told apart" the reason."""

    word: Word
    reason: str = ""


def direction(measure: str) -> int:
    """1 where more is better, -1 where less is; ``psnr_windows.LABEL`` is as ``psnr``.

    Raises KeyError for a measure without an order.
    """
    name = measure.partition(".")[0].removesuffix("_windows")
    if name in HIGHER_IS_BETTER:
        return 1
    if name in LOWER_IS_BETTER:
        return -1
    raise KeyError(measure)


def is_beyond(measure: str, to_floor: Difference | None) -> bool:
    """Rule 3 for one method: farther from BF16 than the floor, by an interval without zero."""
    if measure in WITHOUT_FLOOR:
        return True
    return (
        to_floor is not None
        and to_floor.excludes_zero()
        and direction(measure) * to_floor.mean < 0.0
    )


def judge(
    measure: str,
    pair: Difference | None,
    to_floor: Difference | None,
    other_to_floor: Difference | None,
) -> Verdict:
    """The rule of this module. ``pair`` is method - other; the others are method - floor."""
    if pair is None or pair.low is None:
        return Verdict(Word.not_told_apart, "no interval: fewer than two shared episodes")
    if pair.episodes < FEW_EPISODES:
        return Verdict(Word.not_told_apart, f"{pair.episodes} episodes, fewer than {FEW_EPISODES}")
    if not pair.excludes_zero():
        return Verdict(Word.not_told_apart, "the interval contains 0")
    is_better = direction(measure) * pair.mean > 0.0
    of_worse = other_to_floor if is_better else to_floor
    if of_worse is None and measure not in WITHOUT_FLOOR:
        return Verdict(Word.not_told_apart, "no noise floor was measured")
    if not is_beyond(measure, of_worse):
        return Verdict(Word.not_told_apart, "both are within the noise floor")
    return Verdict(Word.better if is_better else Word.worse)


class Judge:
    """Verdicts between the methods of one comparison, from their rollouts.

    Holds every measure of every rollout (FP64, curves left out).
    """

    def __init__(
        self,
        records: Mapping[str, Sequence[RolloutRecord]],
        windows: Sequence[FrameWindow],
        *,
        confidence: float = 0.95,
        resamples: int = 2000,
        floors: Sequence[str] = FLOORS,
    ) -> None:
        self.options = {"confidence": confidence, "resamples": resamples}
        self.floors = [name for name in floors if name in records]
        self.records = records
        self.values = {
            method: {
                name: value
                for name, value in measures(list(entries), windows).items()
                if value.ndim == 1
            }
            for method, entries in records.items()
        }
        self.places = {
            method: {(r.episode, r.seed): index for index, r in enumerate(entries)}
            for method, entries in records.items()
        }
        self.found: dict[tuple[str, str], dict[str, Difference]] = {}

    def differences(self, method: str, other: str) -> dict[str, Difference]:
        """Measure -> method - other over the episodes that have every shared seed in both."""
        if (method, other) not in self.found:
            self.found[method, other] = self._differences(method, other)
        return self.found[method, other]

    def _differences(self, method: str, other: str) -> dict[str, Difference]:
        places, others = self.places[method], self.places[other]
        shared = [r for r in self.records[method] if (r.episode, r.seed) in others]
        episodes, _, whole = complete_grid(shared)
        if not episodes:
            return {}
        keys = [(r.episode, r.seed) for r in whole]
        names = sorted(self.values[method].keys() & self.values[other].keys())
        sides = []
        for name_of, where in ((method, places), (other, others)):
            rows = [where[key] for key in keys]
            table: Values = np.stack([self.values[name_of][name][rows] for name in names], axis=-1)
            sides.append(table.reshape(len(episodes), -1, len(names)))
        means = (sides[0] - sides[1]).mean(axis=(0, 1))
        if len(episodes) < 2:
            return {
                n: Difference(float(m), None, None, 1) for n, m in zip(names, means, strict=True)
            }
        interval = paired_interval(*sides, **self.options)
        return {
            name: Difference(
                float(means[i]), float(interval.low[i]), float(interval.high[i]), len(episodes)
            )
            for i, name in enumerate(names)
        }

    def to_floor(self, method: str, measure: str) -> Difference | None:
        """Method - floor, of the floor that it is least beyond; None without a floor."""
        if not self.floors or method in self.floors:
            return None
        found = [self.differences(method, floor).get(measure) for floor in self.floors]
        if None in found:
            return None
        known = [difference for difference in found if difference is not None]
        within = [d for d in known if not is_beyond(measure, d)]
        return (within or known)[0]

    def verdict(self, method: str, other: str, measure: str) -> Verdict:
        """What may be said of ``method`` beside ``other`` in ``measure``."""
        return judge(
            measure,
            self.differences(method, other).get(measure),
            self.to_floor(method, measure),
            self.to_floor(other, measure),
        )

    def told(self, method: str, other: str, differences: Mapping[str, Any]) -> dict[str, Any]:
        """``differences`` (of `paired_difference`) with verdict and reason in every entry."""

        def judged(entry: Mapping[str, Any], measure: str) -> dict[str, Any]:
            if "mean" not in entry:
                return {name: judged(inner, f"{measure}.{name}") for name, inner in entry.items()}
            verdict = self.verdict(method, other, measure)
            return {**entry, "verdict": verdict.word.value, "reason": verdict.reason}

        return {name: judged(entry, name) for name, entry in differences.items()}

    def better_than(self, method: str) -> dict[str, list[str]]:
        """Measure -> methods that ``method`` is better than; floors are no contenders."""
        found: dict[str, list[str]] = {}
        for measure in sorted(self.values[method]):
            found[measure] = [
                other
                for other in self.records
                if other not in (method, *self.floors)
                and self.verdict(method, other, measure).word is Word.better
            ]
        return found
