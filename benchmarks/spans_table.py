"""Rows of spans.py as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from .layer_work import Row, captured_name

MIB = 2**20


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table, its numbers to the right."""
    every = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def layer_table(rows: Sequence[Row]) -> str:
    """A line for each method, batch and span length, in the order of the rows."""
    timed = ["encode", "decode"]
    replayed = captured_name("decode")
    if any(row["work"] == replayed for row in rows):
        timed.append(replayed)
    head = [
        "method",
        "batch",
        "span",
        "tokens",
        "bits, newest",
        "older",
        "window",
        "MiB",
        "of BF16",
    ]
    for work in timed:
        head += [f"{work}, ns a token", "× first", "× copy"]

    def key(row: Row) -> tuple[str, int, int]:
        return row["method"], row["batch"], row["span_chunks"]

    lines = []
    for _, group in groupby(rows, key):
        works = {row["work"]: row for row in group}
        one = works["encode"]
        line = [
            one["method"],
            str(one["batch"]),
            str(one["span_chunks"]),
            f"{one['span_tokens']:,}",
            number(one["bits_newest"], ".3f"),
            number(one["bits_older"], ".3f"),
            f"{one['spans']} spans, {one['frames']} frames",
        ]
        if one["outcome"] == "ok":
            line.append(f"{one['window_bytes'] / MIB:.1f}")
            line.append(f"{one['window_bytes'] / one['bf16_bytes']:.3f}")
        else:
            line += [one["outcome"], "–"]
        for work in timed:
            own = works[work]
            seconds = own["seconds_per_token"]
            line.append(number(None if seconds is None else 1e9 * seconds, ".4g"))
            line += [number(own["ratio_first"], ".3f"), number(own["ratio_copy"], ".2f")]
        lines.append(line)
    return markdown(head, lines)


def rollouts_table(rows: Sequence[Row]) -> str:
    """A line for each row; bytes of one walk."""
    head = [
        "method", "batch", "span", "ms a frame", "× BF16", "MiB a walk, end", "of BF16", "mean",
        "of BF16", "bits, end", "mean",
    ]  # fmt: skip
    lines = []
    for row in rows:
        line = [row["method"], str(row["batch"]), str(row["span_chunks"])]
        if row["outcome"] == "ok":
            walk = MIB * row["batch"]
            line += [
                f"{1e3 * row['seconds_per_frame']:.3f}",
                number(row["over_bf16"], ".3f"),
                f"{row['resident_bytes'] / walk:.3f}",
                number(row["resident_over_bf16"], ".3f"),
                f"{row['resident_bytes_mean'] / walk:.3f}",
                number(row["resident_mean_over_bf16"], ".3f"),
                f"{row['bits_per_element']:.3f}",
                f"{row['bits_per_element_mean']:.3f}",
            ]
        else:
            line += [row["outcome"]] + ["–"] * 7
        lines.append(line)
    return markdown(head, lines)


def number(value: float | None, form: str) -> str:
    """A dash where there is none."""
    return "–" if value is None else format(value, form)
