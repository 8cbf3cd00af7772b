"""Bootstrap intervals: coverage on synthetic data, nesting, determinism, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from steadykv.errors import ConfigError, NonFiniteError, ShapeError
from steadykv.evaluation.bootstrap import (
    bootstrap_interval,
    paired_interval,
    ratio_interval,
    student_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(5, 2.5706), (7, 2.3646), (11, 2.2010), (31, 2.0395), (10_000, 1.9602)],
)
def test_student_quantile_matches_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(expected, abs=1e-3)
    assert student_quantile(0.5, freedom) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("episodes", "skewed"), [(8, False), (32, False), (32, True)])
def test_coverage_with_seeds_that_resemble_each_other(episodes: int, skewed: bool) -> None:
    """Of 400 intervals at 95 %, 91 to 98 % hold the true mean (binomial noise: 1.1 %)."""
    rng = np.random.default_rng(7)
    hits, flat_hits, trials = 0, 0, 400
    for trial in range(trials):
        of_episode = rng.normal(size=(episodes, 1))
        if skewed:
            of_episode = np.exp(0.5 * of_episode) - np.exp(0.125)
        values = of_episode + 0.3 * rng.normal(size=(episodes, 3))
        interval = bootstrap_interval(values, resamples=500, seed=trial)
        hits += bool(interval.low <= 0.0 <= interval.high)
        # The same numbers taken for independent rollouts: what nesting guards against.
        flat = bootstrap_interval(values.reshape(-1, 1), resamples=500, seed=trial)
        flat_hits += bool(flat.low <= 0.0 <= flat.high)
    assert 0.91 <= hits / trials <= 0.98
    assert flat_hits / trials < 0.85


def test_width_matches_the_standard_error() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(200, 1))
    interval = bootstrap_interval(values, resamples=4000)
    error = values.std(ddof=1) / np.sqrt(200)
    assert float(interval.high - interval.low) == pytest.approx(2 * 1.96 * error, rel=0.06)
    assert float(interval.mean) == pytest.approx(values.mean())


def test_confidence_orders_the_widths_and_constants_have_none() -> None:
    values = np.random.default_rng(0).normal(size=(12, 2))
    widths = []
    for confidence in (0.5, 0.8, 0.95):
        interval = bootstrap_interval(values, confidence=confidence)
        assert interval.low < interval.mean < interval.high
        widths.append(float(interval.high - interval.low))
    assert widths == sorted(widths)
    constant = bootstrap_interval(np.full((5, 2), 3.25))
    assert (constant.mean, constant.low, constant.high) == pytest.approx((3.25, 3.25, 3.25))


def test_columns_share_their_draws_and_the_generator_is_private() -> None:
    values = np.random.default_rng(1).normal(size=(9, 2, 4))
    np.random.seed(3)  # noqa: NPY002 (the global generator is what must not move)
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    together = bootstrap_interval(values, seed=5)
    assert np.random.random() == expected  # noqa: NPY002
    assert together.low.shape == (4,)
    for column in range(4):
        alone = bootstrap_interval(values[..., column], seed=5)
        assert float(alone.low) == pytest.approx(together.low[column])
        assert float(alone.high) == pytest.approx(together.high[column])
    assert not np.allclose(together.low, bootstrap_interval(values, seed=6).low)


def test_pairing_removes_what_both_methods_share() -> None:
    rng = np.random.default_rng(2)
    shared = 5.0 * rng.normal(size=(16, 3))
    better = shared + 1.0 + 0.1 * rng.normal(size=(16, 3))
    difference = paired_interval(better, shared)
    assert 0.9 < difference.low < 1.0 < difference.high < 1.1
    apart = bootstrap_interval(better)
    assert (apart.high - apart.low) > 10 * (difference.high - difference.low)


def test_bad_input_is_refused() -> None:
    good = np.ones((3, 2))
    with pytest.raises(ShapeError, match="at least 2 episodes"):
        bootstrap_interval(good[:1])
    with pytest.raises(ShapeError, match=r"\[episodes, seeds"):
        bootstrap_interval(good[0])
    with pytest.raises(ShapeError, match="same episodes"):
        paired_interval(good, good[:2])
    infinite = good.copy()
    infinite[2, 1] = np.inf
    with pytest.raises(NonFiniteError, match=r"inf at \[2, 1\]"):
        bootstrap_interval(infinite)
    with pytest.raises(ConfigError, match="confidence"):
        bootstrap_interval(good, confidence=95)
    with pytest.raises(ConfigError, match="resamples"):
        bootstrap_interval(good, resamples=10)


def test_a_ratio_is_of_means_and_draws_the_same_episodes_on_both_sides() -> None:
    rng = np.random.default_rng(4)
    size = np.exp(rng.normal(size=(20, 1)))  # walks differ far more than methods do
    against = size * np.exp(0.05 * rng.normal(size=(20, 3)))
    values = 0.6 * size * np.exp(0.05 * rng.normal(size=(20, 3)))
    found = ratio_interval(values, against, resamples=4000)
    assert float(found.mean) == pytest.approx(values.mean() / against.mean())
    assert found.low < 0.6 < found.high
    assert found.high - found.low < 0.06
    # Resampled apart, the two sides would vary as the walks do.
    assert bootstrap_interval(values).high / bootstrap_interval(against).low > 1.0
    exact = ratio_interval(0.25 * against, against)
    assert (exact.mean, exact.low, exact.high) == pytest.approx((0.25, 0.25, 0.25))
    # To first order, (mean a)/(mean b) varies as the mean of (a - ratio b)/(mean b).
    linear = bootstrap_interval((values - found.mean * against) / against.mean(), resamples=4000)
    assert float(found.high - found.low) == pytest.approx(float(linear.high - linear.low), rel=0.1)


def test_a_ratio_refuses_what_nothing_can_be_divided_by() -> None:
    values = np.ones((8, 2))
    with pytest.raises(NonFiniteError, match="above zero"):
        ratio_interval(values, 0 * values)
    one_side = values.copy()
    one_side[1:] = 0  # some resample misses the one episode that is not zero
    with pytest.raises(NonFiniteError, match="above zero"):
        ratio_interval(values, one_side)
    assert float(ratio_interval(one_side, values).low) == 0.0
    with pytest.raises(ShapeError, match="same episodes"):
        ratio_interval(values, values[:7])
    with pytest.raises(ConfigError, match="resamples"):
        ratio_interval(values, values, resamples=10)
