"""From finished rollouts to one row per method: means, intervals, paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadykv.evaluation.bootstrap import Interval, bootstrap_interval, paired_interval
from steadykv.evaluation.metrics.frames import PEAK
from steadykv.evaluation.protocol import PSNR_CEILING_DB, FrameWindow

Values = NDArray[np.float64]


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout of one method against the BF16 rollout of the same episode and seed.

    mse_by_frame, ssim_by_frame: every frame of the video, context frames included.
    flicker_by_step: element t - 1 belongs to the step that ends in frame t.
    top1_shift, top5_shift: on the BF16 trajectory of this episode and seed; None if not measured.
    """

    method: str
    episode: str
    seed: int
    mse_by_frame: tuple[float, ...]
    ssim_by_frame: tuple[float, ...]
    flicker_by_step: tuple[float, ...]
    top1_shift: float | None = None
    top5_shift: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class MethodCost:
    """What the caches of one method's rollouts cost, per rollout. See docs/results-schema.md.

    resident_parts: bytes by part of the ledger, which add up to resident_bytes.
    bits_per_element_mean: over time, None in rows of older runs.
    """

    keys: str
    values: str
    bits_per_element: float
    bits_per_element_mean: float | None
    compression: float
    compression_mean: float
    resident_bytes: int
    resident_parts: dict[str, int] | None
    peak_bytes: int
    seconds: float
    batch_rollouts: int


def capped_psnr(mse: Values) -> Values:
    """PSNR in dB of mean squared errors, at most PSNR_CEILING_DB (equal frames are infinite)."""
    with np.errstate(divide="ignore"):
        return np.minimum(10.0 * np.log10(PEAK**2 / mse), PSNR_CEILING_DB)


def measures(records: Sequence[RolloutRecord], windows: Sequence[FrameWindow]) -> dict[str, Values]:
    """Every number of a row as [rollouts] (or [rollouts, frames]), from records of one method.

    Names: psnr, ssim, flicker_error (over the longest window), psnr_windows.LABEL, psnr_by_frame,
    and top1_shift, top5_shift where all records have them.
    """
    mse = np.array([record.mse_by_frame for record in records])
    ssim = np.array([record.ssim_by_frame for record in records])
    flicker = np.array([record.flicker_by_step for record in records])
    longest = windows[-1]
    first, stop = longest.start, longest.end
    values = {
        "psnr": capped_psnr(mse[:, first:stop].mean(axis=1)),
        "ssim": ssim[:, first:stop].mean(axis=1),
        # The step into the first frame is element first - 1.
        "flicker_error": flicker[:, max(first - 1, 0) : stop - 1].mean(axis=1),
        "psnr_by_frame": capped_psnr(mse),
    }
    for window in windows:
        inside = mse[:, window.start : window.end].mean(axis=1)
        values[f"psnr_windows.{window.label}"] = capped_psnr(inside)
    for name in ("top1_shift", "top5_shift"):
        shifts = [getattr(record, name) for record in records]
        if all(shift is not None for shift in shifts):
            values[name] = np.array(shifts)
    return values


def first_changed_frame(records: Iterable[RolloutRecord]) -> int | None:
    """The first frame in which any rollout differs from BF16, None when none ever does."""
    changed = [np.flatnonzero(record.mse_by_frame) for record in records]
    return min((int(frames[0]) for frames in changed if len(frames)), default=None)


def complete_grid(
    records: Sequence[RolloutRecord],
) -> tuple[list[str], list[int], list[RolloutRecord]]:
    """Episodes that have every seed, the seeds, and their records episode by episode.

    Intervals need every episode to weigh the same; an interrupted run may end within an episode.
    """
    by_key = {(record.episode, record.seed): record for record in records}
    seeds = sorted({record.seed for record in records})
    episodes = list(dict.fromkeys(record.episode for record in records))
    whole = [name for name in episodes if all((name, seed) in by_key for seed in seeds)]
    return whole, seeds, [by_key[name, seed] for name in whole for seed in seeds]


def _by_episode(values: Values, episodes: int, seeds: int) -> Values:
    return values.reshape(episodes, seeds, *values.shape[1:])


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as nested dictionaries."""
    result: dict[str, Any] = {}
    for name, value in flat.items():
        outer, _, inner = name.partition(".")
        if inner:
            result.setdefault(outer, {})[inner] = value
        else:
            result[outer] = value
    return result


def _bounds(interval: Interval) -> Any:
    return np.stack((interval.low, interval.high), axis=-1).tolist()


def summarise(
    records: Sequence[RolloutRecord],
    windows: Sequence[FrameWindow],
    *,
    confidence: float,
    resamples: int,
) -> dict[str, Any]:
    """The measured fields of one method's row (all but its costs and labels).

    Means run over all finished rollouts. Intervals run over the episodes that have every seed, and
    are None when there are fewer than two of those.
    """
    values = measures(records, windows)
    means = {name: value.mean(axis=0).tolist() for name, value in values.items()}
    means.setdefault("top1_shift", None)
    means.setdefault("top5_shift", None)
    episodes, seeds, whole = complete_grid(records)
    intervals = None
    if len(episodes) > 1:
        bounds = {
            name: _bounds(
                bootstrap_interval(
                    _by_episode(value, len(episodes), len(seeds)),
                    confidence=confidence,
                    resamples=resamples,
                )
            )
            for name, value in measures(whole, windows).items()
        }
        intervals = _nested(bounds)
    return _nested(means) | {
        "identical_rollouts": sum(not any(record.mse_by_frame) for record in records),
        "first_changed_frame": first_changed_frame(records),
        "n_rollouts": len(records),
        "n_episodes": len({record.episode for record in records}),
        "n_seeds": len(seeds),
        "intervals": intervals,
    }


def paired_difference(
    records: Sequence[RolloutRecord],
    against: Sequence[RolloutRecord],
    windows: Sequence[FrameWindow],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> dict[str, Any]:
    """Mean of (method - against) over the rollouts that both finished, with its interval.

    Every measure but the curves, as ``{"mean": x, "interval": [low, high]}``; the interval is None
    with fewer than two episodes that have every seed in both. Empty when they share no rollout.
    """
    shared = {(r.episode, r.seed) for r in records} & {(r.episode, r.seed) for r in against}
    sides = []
    for side in (records, against):
        _, _, whole = complete_grid([r for r in side if (r.episode, r.seed) in shared])
        sides.append(whole)
    if not sides[0]:
        return {}
    episodes = len({record.episode for record in sides[0]})
    first, second = (measures(side, windows) for side in sides)
    result: dict[str, Any] = {}
    for name in first.keys() & second.keys() - {"psnr_by_frame"}:
        pair = [_by_episode(value[name], episodes, -1) for value in (first, second)]
        entry: dict[str, Any] = {"mean": float((pair[0] - pair[1]).mean()), "interval": None}
        if episodes > 1:
            entry["interval"] = _bounds(
                paired_interval(*pair, confidence=confidence, resamples=resamples)
            )
        result[name] = entry
    return _nested(dict(sorted(result.items())))
