"""How many walks: as a simulation with the bootstrap finds, and as docs/protocol.md prints it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.power import episodes_needed, main, spread
from steadykv.evaluation.bootstrap import bootstrap_interval
from steadykv.evaluation.protocol import FEW_EPISODES

DOCUMENT = Path(__file__).parent.parent / "docs" / "protocol.md"


@pytest.mark.parametrize(("sd", "difference"), [(2.0, 1.0), (3.0, 2.0), (1.0, 1.0)])
def test_that_many_walks_find_the_difference_in_four_of_five_cases(
    sd: float, difference: float
) -> None:
    count = episodes_needed(sd, difference)
    rng = np.random.default_rng(0)
    trials = 400
    found = 0
    for _ in range(trials):
        values = rng.normal(difference, sd, size=(count, 1))
        found += bool(bootstrap_interval(values, resamples=400).low > 0)
    # Four standard errors of a share of 400 around 80 %: 0.08.
    assert 0.72 <= found / trials <= 0.90


def test_counts_grow_with_the_square_and_never_fall_below_the_rule() -> None:
    assert episodes_needed(0.0, 1.0) == FEW_EPISODES
    assert episodes_needed(40.0, 1.0) == pytest.approx(16 * episodes_needed(10.0, 1.0), rel=0.02)
    # The textbook's (1.96 + 0.84)^2 for large counts.
    assert episodes_needed(10.0, 1.0) == pytest.approx(785, abs=4)


def test_the_spread_with_one_seed_and_with_all() -> None:
    gap = np.array([[1.0, 3.0], [5.0, 3.0], [3.0, 9.0]])
    one, both = spread(gap, np.zeros_like(gap))
    assert one == pytest.approx(np.sqrt((4.0 + 12.0) / 2))
    assert both == pytest.approx(np.std([2.0, 4.0, 6.0], ddof=1))


def test_the_document_holds_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(printed) > 30
    lines = DOCUMENT.read_text().splitlines()
    missing = [line for line in printed if line not in lines]
    assert not missing, missing


def test_other_rollouts_and_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--pairs", "qvg:kivi"])
    assert "| 6-8 | qvg - kivi | -4.42 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no rollouts of qvg:nothing"):
        main(["--pairs", "qvg:nothing"])
