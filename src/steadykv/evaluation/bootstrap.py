"""Confidence intervals of a mean over episodes that were each rolled out with several seeds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steadykv.errors import ConfigError, NonFiniteError, ShapeError


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence bounds, each FP64 of the values' trailing shape."""

    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t, by its expansion in 1/freedom around the normal quantile.

    Abramowitz and Stegun 26.7.5. Off by under 0.1 % at 97.5 % from 5 degrees of freedom on.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim < 2:
        raise ShapeError(
            f"values has shape {table.shape}; expected [episodes, seeds, ...]: "
            "one seed is values[:, None]"
        )
    if table.shape[0] < 2 or table.shape[1] < 1:
        raise ShapeError(
            f"values has {table.shape[0]} episodes and {table.shape[1]} seeds; an interval expects "
            "at least 2 episodes and 1 seed: run more episodes"
        )
    if not np.isfinite(table).all():
        first = np.argwhere(~np.isfinite(table))[0].tolist()
        raise NonFiniteError(
            f"values holds {table[tuple(first)]} at {first}; expected finite numbers: "
            "give infinite PSNR a ceiling before averaging"
        )
    return table


@lru_cache(maxsize=8)
def _shares(episodes: int, resamples: int, seed: int) -> NDArray[np.float64]:
    """How much of each resample every episode is, [resamples, episodes]: its mean is a product."""
    drawn = np.random.default_rng(seed).integers(0, episodes, size=(resamples, episodes))
    shares = np.zeros((resamples, episodes))
    np.add.at(shares, (np.arange(resamples)[:, None], drawn), 1.0 / episodes)
    shares.flags.writeable = False
    return shares


def bootstrap_interval(
    values: ArrayLike, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Mean of ``values`` [episodes, seeds, ...] and its bootstrap interval over episodes.

    Whole episodes are drawn with replacement and bring all their seeds along, since seeds of one
    episode resemble each other (the cluster bootstrap). Bounds are percentiles of the resampled
    means; their levels are widened by sqrt(n / (n - 1)) and Student's t for n episodes, because
    plain percentiles are too narrow for few (Hesterberg 2015, section 4.4: "expanded" percentiles).
    Simulated 95 % intervals of normal data held the true mean in 93 to 96 % of cases from 6
    episodes on, but in 88 % with 4 and 75 % with 3: treat those as a hint.
    Trailing dimensions are treated alike: the same draws serve every column, so paired differences
    and curves stay consistent. The generator is private and seeded by ``seed``.

    Allocates resamples x (trailing values + episodes) in FP64; the latter is kept for the next
    call. Raises ShapeError (fewer than 2 episodes), NonFiniteError, or ConfigError (confidence
    outside 0..1, under 100 resamples).
    """
    table = _checked(values)
    _check_options(confidence, resamples)
    by_episode = table.mean(axis=1)
    episodes = by_episode.shape[0]
    flat = by_episode.reshape(episodes, -1)
    low, high = _bounds(_shares(episodes, resamples, seed) @ flat, episodes, confidence)
    shape = by_episode.shape[1:]
    return Interval(flat.mean(axis=0).reshape(shape), low.reshape(shape), high.reshape(shape))


def _check_options(confidence: float, resamples: int) -> None:
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"confidence is {confidence}; expected a number between 0 and 1")
    if resamples < 100:
        raise ConfigError(f"resamples is {resamples}; expected at least 100")


def _bounds(
    resampled: NDArray[np.float64], episodes: int, confidence: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Expanded percentiles of what each resample gave, [resamples, ...]."""
    quantile = student_quantile(0.5 + confidence / 2, episodes - 1)
    tail = NormalDist().cdf(-((episodes / (episodes - 1)) ** 0.5) * quantile)
    low, high = np.quantile(resampled, [tail, 1.0 - tail], axis=0)
    return low, high


def paired_interval(values: ArrayLike, against: ArrayLike, **options: Any) -> Interval:
    """Interval of the mean difference ``values - against``, rollout by rollout.

    Both are [episodes, seeds, ...] over the same episodes and seeds in the same order; ``options``
    are those of :func:`bootstrap_interval`. Raises ShapeError when the shapes differ.
    """
    first, second = _checked(values), _checked(against)
    _check_pair(first, second)
    return bootstrap_interval(first - second, **options)


def ratio_interval(
    values: ArrayLike,
    against: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Ratio of means, ``values`` over ``against``, and its interval; ``mean`` holds the ratio.

    Both are [episodes, seeds, ...] over the same episodes and seeds in the same order, and every
    resample takes the same episodes on both sides. Otherwise as :func:`bootstrap_interval`, whose
    errors it raises; ShapeError when the shapes differ, and NonFiniteError where a resampled mean
    of ``against`` is not above zero.
    """
    tables = _checked(values), _checked(against)
    _check_options(confidence, resamples)
    _check_pair(*tables)
    above, below = (table.mean(axis=1) for table in tables)
    episodes, shape = above.shape[0], above.shape[1:]
    shares = _shares(episodes, resamples, seed)
    parts = shares @ above.reshape(episodes, -1), shares @ below.reshape(episodes, -1)
    if not (parts[1] > 0).all() or not (below.mean(axis=0) > 0).all():
        raise NonFiniteError(
            f"a mean of against is {parts[1].min()}; expected numbers above zero to divide by: "
            "report a difference instead"
        )
    low, high = _bounds(parts[0] / parts[1], episodes, confidence)
    ratio = above.mean(axis=0) / below.mean(axis=0)
    return Interval(ratio, low.reshape(shape), high.reshape(shape))


def _check_pair(first: NDArray[np.float64], second: NDArray[np.float64]) -> None:
    if first.shape != second.shape:
        raise ShapeError(
            f"values has shape {first.shape}, against {second.shape}; "
            "expected the same episodes and seeds for both"
        )
