"""Words for numbers: whoever is ahead in the rows is ahead in the sentence."""

from __future__ import annotations

from typing import Any

import pytest

from steadykv.evaluation.protocol import FLOOR, FLOOR_FP32, FLOORS
from steadykv.report import text


def row(method: str, psnr: float, flicker: float = 0.02, bits: float = 3.0, **more: Any) -> Any:
    keys, _, values = method.partition(":")
    dense = method in FLOORS
    return {
        "method": method,
        "keys": "bf16" if dense else keys,
        "values": "bf16" if dense else values or keys,
        "bits_per_element": bits,
        "psnr": psnr,
        "flicker_error": flicker,
        "resident_bytes": 14 << 20,
        "n_rollouts": 1,
        "n_episodes": 1,
        "identical_rollouts": 0,
        "intervals": None,
    } | more


ORIGINAL = row("bf16", 100.0, 0.0, 16.0, identical_rollouts=1)
NOISE = row(FLOOR, 60.0, 0.001, 16.0)


@pytest.mark.parametrize(("best", "worst"), [("quantwm", "qvg"), ("qvg", "quantwm")])
def test_the_sentence_follows_the_numbers(best: str, worst: str) -> None:
    rows = [ORIGINAL, row("kivi", 34.0), row(worst, 27.0, 0.03), row(best, 41.0, 0.01), NOISE]
    sentence = text.second_sentence(rows)
    first, second = (sentence.index(text.method_title(name)) for name in (best, worst))
    assert first < second
    assert "41.0 dB: small differences in texture" in sentence
    assert "27.0 dB: plainly visible differences" in sentence
    assert "3.0 times as much false flicker" in sentence


def test_titles_carry_what_was_changed() -> None:
    assert text.method_title("quantwm@rank=4+candidates=1") == "QuantWM rank=4 candidates=1"
    assert text.method_title("qvg@bits=4:bf16") == "QVG bits=4 : BF16"


def test_less_flicker_of_the_farthest_is_said_too() -> None:
    rows = [ORIGINAL, row("kivi", 40.0, 0.02), row("qvg", 30.0, 0.01), NOISE]
    sentence = text.second_sentence(rows)
    assert "less false flicker (0.50 times" in sentence


def test_methods_that_hardly_differ_are_not_ranked() -> None:
    sentence = text.second_sentence([ORIGINAL, row("qvg", 35.2), row("quantwm", 35.5)])
    assert sentence.startswith("Nothing sets the methods apart")
    assert "0.3 dB" in sentence


def test_within_the_noise_floor_is_no_difference() -> None:
    rows = [ORIGINAL, row("quantwm", 50.1), row("qvg", 30.0), row(FLOOR, 50.0, 0.0, 16.0)]
    assert "rounding noise" in text.second_sentence(rows)
    assert "(50.0 dB" in text.about_psnr(rows)


def test_one_walk_within_its_noise_floor_ranks_nothing() -> None:
    """The farther of the two is no farther than BF16 computed otherwise: neither is closer."""
    near, far = row("quantwm", 45.0), row("qvg", 42.0)
    sentence = text.second_sentence([ORIGINAL, near, far, row(FLOOR, 40.0)])
    assert sentence.startswith("This walk does not tell the methods apart")
    assert "stays closest" not in sentence
    assert "does not tell" in text.second_sentence([ORIGINAL, near, far])  # none was measured
    both = [row(FLOOR, 60.0), row(FLOOR_FP32, 40.0)]
    assert "does not tell" in text.second_sentence([ORIGINAL, near, far, *both])
    assert "stays closest" in text.second_sentence([ORIGINAL, near, far, row(FLOOR, 43.0)])


def test_one_walk_with_equal_numbers_has_no_winner_among_them() -> None:
    tied, far = (row("quantwm", 41.0), row("qvg4", 41.0)), row("qvg", 35.0)
    sentence = text.second_sentence([ORIGINAL, *tied, far, row(FLOOR, 60.0)])
    assert "not told apart from" in sentence
    assert "stays closest" not in sentence


@pytest.mark.parametrize(("near", "far"), [(0.01, 0.03), (0.03, 0.01)])
def test_flicker_is_compared_only_where_it_is_told_apart(near: float, far: float) -> None:
    def sentence(beaten: list[str], floor: float, **more: Any) -> str:
        calm = {"better_than": {"psnr": ["qvg"], "flicker_error": beaten}}
        other = {"better_than": {"psnr": [], "flicker_error": beaten}}
        rows = [row("quantwm", 40.0, near, **calm, **more), row("qvg", 30.0, far, **other, **more)]
        return text.second_sentence([*rows, row(FLOOR, 50.0, floor, **more)])

    many = {"n_rollouts": 12, "n_episodes": 12}
    assert "false flicker" in sentence(["quantwm", "qvg"], 0.001, **many)
    told_nothing = sentence([], 0.001, **many)
    assert "strays farthest" in told_nothing
    assert "flicker" not in told_nothing
    assert "false flicker" in sentence([], 0.02)  # one walk: beyond the floor or not
    assert "flicker" not in sentence([], 0.04)


def test_the_farthest_is_named_with_those_it_is_not_told_apart_from() -> None:
    many = {"n_rollouts": 12, "n_episodes": 12}
    rows = [
        row("quantwm", 40.0, better_than={"psnr": ["kivi", "qvg"]}, **many),
        row("kivi", 31.0, better_than={"psnr": []}, **many),
        row("qvg", 30.0, better_than={"psnr": []}, **many),
    ]
    sentence = text.second_sentence(rows)
    assert "QVG strays farthest from it" in sentence
    assert sentence.endswith("not told apart from KIVI.")
    rows[1]["better_than"]["psnr"] = ["qvg"]
    assert "not told apart" not in text.second_sentence(rows)


def test_identical_pictures_have_no_decibels() -> None:
    same = row("bf16:bf16", 100.0, 0.0, 16.0)
    assert text.packed_rows([same]) == []
    identical = row("kivi_recent", 100.0, 0.0, identical_rollouts=1)
    assert "no difference at all" in text.second_sentence([ORIGINAL, identical])


def test_without_a_packing_method_nothing_is_claimed() -> None:
    lead = text.lead([ORIGINAL])
    assert "one video" in lead[0]
    assert "nothing to compare" in lead[1]


def test_two_videos_are_both() -> None:
    rows = [ORIGINAL, row("qvg", 30.0)]
    assert text.first_sentence(rows).startswith("Both videos are the same walk")
    assert text.second_sentence(rows) == (
        "Compared with the original, QVG comes out at 30.0 dB: differences that show side by side."
    )


@pytest.mark.parametrize("rollouts", [1, 96])
def test_the_lead_is_two_sentences_with_every_size(rollouts: int) -> None:
    more = {"n_rollouts": rollouts, "n_episodes": rollouts}
    rows = [
        ORIGINAL | more,
        row("kivi", 34.0, bits=3.0, **more),
        row("qvg", 30.0, bits=2.63, **more),
    ]
    lead = text.lead(rows)
    assert len(lead) == 2
    assert all(sentence.endswith(".") for sentence in lead)
    # Inside a sentence a full stop is only part of a number.
    assert not any(". " in sentence for sentence in lead)
    assert "3.0 with KIVI" in lead[0]
    assert "2.6 with QVG" in lead[0]
    assert (f"{rollouts} walks" in lead[0]) == (rollouts > 1)


@pytest.mark.parametrize(
    ("method", "title"),
    [("quantwm", "QuantWM"), ("quantwm:bf16", "QuantWM : BF16"), ("novel", "novel")],
)
def test_titles(method: str, title: str) -> None:
    assert text.method_title(method) == title


def test_the_explanation_names_the_numbers_of_this_run() -> None:
    rows = [ORIGINAL, row("kivi", 34.0, bits=3.0), row("qvg", 30.0, bits=2.63)]
    words = " ".join(text.what_it_is(rows, first_packed=6, context=3))
    assert "14.0 MiB" in words
    assert "2.6 to 3.0 bits" in words
    assert "number 6" in words


def test_the_shown_query_is_described_with_titles() -> None:
    example = {
        "chosen": "chosen because quantwm:bf16 keeps it and qvg moves it",
        "selected": {"bf16": None, "qvg": None, "quantwm": None, "quantwm:bf16": None},
    }
    assert "because QuantWM : BF16 keeps it and QVG moves it" in text.about_shift(example)


def test_the_shown_choice_is_among_packed_patches_and_says_so() -> None:
    words = text.about_shift({"chosen": "chosen", "selected": {}})
    assert "among the remembered patches that are packed" in words
    assert "not packed yet take no part" in words


@pytest.mark.parametrize(("episodes", "hinted"), [(2, True), (5, True), (6, False)])
def test_few_episodes_are_called_a_hint(episodes: int, hinted: bool) -> None:
    rows = [row("qvg", 30.0, n_episodes=episodes, intervals={"psnr": [29.0, 31.0]})]
    for notes in (text.hints(rows), text.about_table(rows)):
        assert ("too narrow" in " ".join(notes)) == hinted
    assert text.hints([row("qvg", 30.0)]) == []  # one walk has no intervals


def test_a_calibration_on_the_walks_that_are_judged_is_said() -> None:
    told = row("kvquant_calibrated", 30.0, n_episodes=12)
    assert text.hints([told]) == []
    shared = {"calibration": {"shared_walks": ["walk-1", "walk-2"]}}
    (hint,) = text.hints([{**told, "configuration": shared}])
    assert "fitted to walks of this comparison (walk-1 and walk-2)" in hint
    assert text.hints([{**told, "configuration": {"calibration": {"shared_walks": []}}}]) == []


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(2.5 * 2**20, "2.50 MiB"), (14 << 20, "14.0 MiB"), (400 << 20, "400 MiB")]
)
def test_mebibytes(nbytes: float, shown: str) -> None:
    assert text.mebibytes(nbytes) == shown
