"""Plain words for measured numbers: names, sentences and explanations of the report.

Every claim is derived from the rows it is given; nothing assumes which method comes out ahead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from steadykv.evaluation.protocol import FEW_EPISODES, FLOOR, FLOOR_FP32, FLOORS
from steadykv.evaluation.verdict import direction

Row = Mapping[str, Any]

TITLES = {
    "bf16": "BF16",
    "rtn": "RTN",
    "rtn_g16_sym": "RTN g16",
    "kivi": "KIVI",
    "kivi_recent": "KIVI recent",
    "quarot": "QuaRot",
    "qvg": "QVG",
    "qvg_pro": "QVG-Pro",
    "qvg4": "QVG4",
    "quantwm": "QuantWM",
    "kvquant": "KVQuant",
    "kvquant_calibrated": "KVQuant calibrated",
    "steady": "Steady",
    FLOOR: "noise floor",
    FLOOR_FP32: "FP32 floor",
}

# PSNR down to which a description holds. A rough guide for 8-bit pictures seen side by side at a
# few times their size; the players stand beside the sentence, so that everybody can judge.
WORDS = (
    (42.0, "hard to tell apart by eye"),
    (35.0, "small differences in texture"),
    (28.0, "differences that show side by side"),
    (22.0, "plainly visible differences"),
    (-math.inf, "a different picture"),
)
FOLLOWS = "The upright line moves with the players; a click on a curve takes them there."
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def method_title(method: str) -> str:
    """How a method is called in the report: "quantwm:bf16" becomes "QuantWM : BF16".

    Changed fields follow the name: "qvg@stages=2+bits=4" becomes "QVG stages=2 bits=4".
    """

    def title(side: str) -> str:
        name, _, changes = side.partition("@")
        return " ".join([TITLES.get(name, name), *changes.split("+")]).rstrip()

    return " : ".join(title(side) for side in method.split(":"))


def number_word(count: int) -> str:
    """Small numbers in words."""
    return NUMBERS[count] if 0 <= count < len(NUMBERS) else str(count)


def listed(items: Sequence[str]) -> str:
    """Items as "a", "a and b", "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def is_dense(row: Row) -> bool:
    """Whether keys and values are both stored as they are."""
    return bool(row["keys"] == "bf16" and row["values"] == "bf16")


def packed_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of methods that pack something, the noise floor left out."""
    return [row for row in rows if row["method"] != FLOOR and not is_dense(row)]


def describe(psnr: float) -> str:
    """What a PSNR means to somebody who looks."""
    return next(words for bound, words in WORDS if psnr >= bound)


def first_sentence(rows: Sequence[Row]) -> str:
    """What differs between the videos, with the bits of each method."""
    packed = packed_rows(rows)
    count = len(packed) + 1
    if not packed:
        return "There is one video here: the walk as the model generates it with its full memory."
    sizes = listed(
        [f"{row['bits_per_element']:.1f} with {method_title(row['method'])}" for row in packed]
    )
    walks = max(row["n_rollouts"] for row in rows)
    all_of_them = "Both" if count == 2 else f"All {number_word(count)}"
    subject = f"{all_of_them} videos are the same walk"
    if walks > 1:
        subject = f"Each of {walks} walks was generated {times(count)}"
    return (
        f"{subject} through a world that a neural network makes up as it goes, with the same "
        "buttons and the same random numbers; they differ only in how exactly the network "
        "remembers what it has drawn: with 16 bits a number in the original (BF16), "
        f"{sizes}."
    )


def second_sentence(rows: Sequence[Row]) -> str:
    """Which method stays closest to the original, which strays farthest, and by how much."""
    ranked = sorted(packed_rows(rows), key=lambda row: -row["psnr"])
    floor = next((row for row in rows if row["method"] == FLOOR), None)
    if not ranked:
        return "No method that packs the memory was run, so there is nothing to compare it with."
    best, worst = ranked[0], ranked[-1]
    if len(ranked) == 1:
        title = method_title(best["method"])
        return f"Compared with the original, {title} comes out at {closeness(best, floor)}."
    nearest = f"{method_title(best['method'])} {{}} ({closeness(best, floor)})"
    gap = best["psnr"] - worst["psnr"]
    if gap < 0.5:
        return (
            f"Nothing sets the methods apart: {nearest.format('is nearest the original')}, and "
            f"{method_title(worst['method'])}, the farthest, is within {gap:.1f} dB of it."
        )
    floors = [row for row in rows if row["method"] in FLOORS]
    tied = [row for row in ranked[1:] if not _is_told(best, row, "psnr", floors)]
    if worst in tied:
        walks, mean = ("This walk does", "PSNR") if _is_single(best) else ("These walks do", "mean")
        return (
            f"{walks} not tell the methods apart: "
            f"{nearest.format(f'has the highest {mean}')}, and {method_title(worst['method'])} the "
            f"lowest ({closeness(worst, floor)}), but their difference may be chance or noise."
        )
    sentence = nearest.format("stays closest to the original")
    if tied:
        sentence = nearest.format("is nearest the original")
        sentence += f", not told apart from {titles(tied)}"
    same_words = describe(best["psnr"]) == describe(worst["psnr"])
    far = f"{worst['psnr']:.1f} dB, likewise" if same_words else closeness(worst, floor)
    sentence += f"; {method_title(worst['method'])} strays farthest from it ({far})"
    beside = [row for row in ranked[1:-1] if not _is_told(row, worst, "psnr", floors)]
    if beside:
        sentence += f", not told apart from {titles(beside)},"
    sentence += _flicker_clause(best, worst, floors)
    return sentence.removesuffix(",") + "."


def _flicker_clause(best: Row, worst: Row, floors: Sequence[Row]) -> str:
    """How much more or less false flicker ``worst`` shows; empty where that is not told."""
    calm, other = sorted((best, worst), key=lambda row: float(row["flicker_error"]))
    told = _is_told(calm, other, "flicker_error", floors)
    ratio = worst["flicker_error"] / best["flicker_error"] if best["flicker_error"] > 0 else 1.0
    if told and ratio >= 1.1:
        return f" and shows {ratio:.1f} times as much false flicker"
    if told and ratio <= 1 / 1.1:
        return f", although it shows less false flicker ({ratio:.2f} times as much)"
    return ""


def titles(rows: Sequence[Row]) -> str:
    """Titles of methods as "a, b and c"."""
    return listed([method_title(row["method"]) for row in rows])


def _is_single(row: Row) -> bool:
    return bool(row["n_rollouts"] == 1)


def _is_told(better: Row, worse: Row, measure: str, floors: Sequence[Row]) -> bool:
    """Whether ``better`` may be called so, by the rule of `steadykv.evaluation.verdict`.

    A single walk has no intervals: what is seen there is described, but only where floors of the
    same walk were measured and the worse of the two is farther from the original than each. Equal
    numbers tell nothing.
    """
    if better[measure] == worse[measure]:
        return False
    if _is_single(better) and _is_single(worse):
        sign = direction(measure)
        beyond = (sign * worse[measure] < sign * floor[measure] for floor in floors)
        return bool(floors) and all(beyond)
    return worse["method"] in better.get("better_than", {}).get(measure, ())


def closeness(row: Row, floor: Row | None) -> str:
    """PSNR over the longest window and what it means to somebody who looks."""
    if row["identical_rollouts"] == row["n_rollouts"]:
        return "no difference at all"
    if floor is not None and row["psnr"] >= floor["psnr"] - 0.5:
        return f"{row['psnr']:.1f} dB, as close as the original's own rounding noise"
    return f"{row['psnr']:.1f} dB: {describe(row['psnr'])}"


def what_it_is(rows: Sequence[Row], first_packed: int, context: int) -> list[str]:
    """The explanation for somebody who has never heard of a key/value cache."""
    original = next((row for row in rows if row["method"] == "bf16"), None)
    sizes = sorted(row["bits_per_element"] for row in packed_rows(rows)) or [16.0]
    low, high = f"{sizes[0]:.1f}", f"{sizes[-1]:.1f}"
    bits = low if low == high else f"{low} to {high}"
    held = " "
    if original is not None:
        size = mebibytes(original["resident_bytes"])
        held = f" For this small model and its last seconds that is {size}; "
    return [
        "A world model is a neural network that plays a video game from imagination: it is told "
        "which buttons are pressed and draws the next frames itself, a few at a time. So that a "
        "wall stays where it was, it looks back at what it has drawn before.",
        "For every patch of every past frame it keeps two lists of numbers: a key, by which the "
        "patch is found again, and a value, what is read when it is found. This memory is the "
        "key/value cache. Normally each number takes 16 bits (the format BF16)."
        + held
        + "in large video models it is more than twenty gigabytes and decides whether the model "
        "fits a graphics card at all.",
        f"The other videos come from the same network, but its cache is packed into {bits} bits a "
        "number and unpacked whenever the network looks back. Packing loses detail. The loss "
        "enters the next frames, which are remembered in turn, so errors travel: textures crawl, "
        "edges flicker, and in the end the network may remember another room.",
        f"The first {context} frames are given. The first frame that can differ at all is number "
        f"{first_packed}: before it, nothing has been packed yet.",
    ]


def about_psnr(rows: Sequence[Row]) -> str:
    """How to read the curves, with the noise floor of this run."""
    text = (
        "The curves compare each frame with the same frame of the original. More decibels (dB) "
        "mean closer; 6 dB more is half the error. Two rollouts that differ a little drift apart "
        "for good, so late frames say less about a method than early ones."
    )
    floor = next((row for row in rows if row["method"] == FLOOR), None)
    if floor is None:
        return text
    return text + (
        " The dotted line is the noise floor: the original again, its additions done in another "
        f"order ({floor['psnr']:.1f} dB over the longest window). A method that reaches it is as "
        "close as rounding allows."
    )


def about_shift(example: Mapping[str, Any]) -> str:
    """What the token-shift picture shows, and how the query was chosen."""
    chosen = str(example["chosen"])
    for method in sorted(example["selected"], key=len, reverse=True):
        chosen = re.sub(rf"(?<![\w:]){re.escape(method)}(?![\w:])", method_title(method), chosen)
    return (
        "When it draws a patch, the network asks its memory which older patches matter. The first "
        "picture marks one such asking patch; the others mark, among the remembered patches that "
        "are packed, the one that gets most of the attention, with the original cache and with "
        "each packed one. Patches that are not packed yet take no part here, although the network "
        "sees them too and one of them may get more. Arrows lead from the question to each answer; "
        "a click on a picture shows its frame in the players. If packing changes the answer, the "
        f"network copies from the wrong place. This query is {chosen}."
    )


def headline(rows: Sequence[Row], count: int) -> str:
    """The page's heading."""
    episodes = max((row["n_episodes"] for row in rows), default=1)
    if episodes > 1:
        rollouts = max(row["n_rollouts"] for row in rows)
        return f"{rollouts} walks, each generated {times(count)}"
    return f"One walk, generated {times(count)}"


def times(count: int) -> str:
    """How often, as "once", "twice", "three times"."""
    return {1: "once", 2: "twice"}.get(count, f"{number_word(count)} times")


def lead(rows: Sequence[Row]) -> list[str]:
    """The two sentences that say what one sees."""
    return [first_sentence(rows), second_sentence(rows)]


def short_caption(row: Row | None) -> str:
    """The line below a player."""
    if row is None or is_dense(row):
        return "16 bits"
    return f"{row['bits_per_element']:.2f} bits · {row['compression']:.1f}× smaller"


def about_table(rows: Sequence[Row]) -> list[str]:
    """What the reader of the table has to know beforehand."""
    notes = []
    if any(":" in row["method"] for row in rows):
        notes.append("A name with a colon says how keys are packed, then how values are.")
    if any(row["intervals"] is not None for row in rows):
        notes.append("Small numbers are the confidence interval of the mean above them.")
    return [" ".join([*notes, *hints(rows)])] if notes else []


def hints(rows: Sequence[Row], place: str = "") -> list[str]:
    """What weakens the numbers of this run and has to be said beside them.

    place: of the intervals, where they do not stand beside the sentence (" of the report").
    """
    found = []
    episodes = [row["n_episodes"] for row in rows if row["intervals"] is not None]
    if episodes and min(episodes) < FEW_EPISODES:
        found.append(
            f"With {number_word(min(episodes))} episodes the confidence intervals{place} are too "
            f"narrow: take them as a hint, and run at least {number_word(FEW_EPISODES)} for ones "
            "that hold."
        )
    configuration = rows[0].get("configuration", {}) if rows else {}
    shared = configuration.get("calibration", {}).get("shared_walks")
    if shared:
        found.append(
            f"The calibration was fitted to walks of this comparison ({listed(shared)}): "
            "calibrated methods may do worse on others."
        )
    return found


def about_pairs(against: str) -> str:
    """How to read the table of paired differences."""
    return (
        f"Each walk of a method minus the same walk of {method_title(against)}, then averaged: "
        "walks differ much from each other, methods on one walk less. A method is called better or "
        f"worse only where at least {number_word(FEW_EPISODES)} episodes give an interval without "
        "0 and the worse of the two is beyond the noise floor; all else is not told apart."
    )


def about_sizes(rows: Sequence[Row]) -> str:
    """How to read the plot of quality against size."""
    packed = packed_rows(rows)
    bounded = [row for row in packed if (row["intervals"] or {}).get("psnr")]
    if len(bounded) == len(packed):
        intervals = "The vertical line is the confidence interval of the mean."
    elif bounded:
        intervals = (
            "The vertical line is the confidence interval of the mean; a hollow point has none, "
            "for want of two complete walks, and says less."
        )
    else:
        walks = max(row["n_rollouts"] for row in packed)
        what = "one walk" if walks == 1 else "fewer than two complete walks"
        intervals = (
            f"The points are hollow, because {what} gives no confidence interval: on another walk "
            "they may stand in another order."
        )
    return (
        "Each point is a method: further left is smaller, further up is closer to the original. "
        f"{intervals} The dashed line joins the methods that no other one beats in both."
    )


def mebibytes(nbytes: float) -> str:
    """Bytes as MiB with three digits."""
    value = nbytes / 2**20
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} MiB"
