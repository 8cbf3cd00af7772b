"""What each cache holds, as stacked bars: the parts of its ledger, where rows have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadykv.evaluation.protocol import FLOOR
from steadykv.report import plots, text

Row = Mapping[str, Any]

PARTS = "resident_parts"  # bytes by part of the ledger at the end of a rollout, in newer rows
WORDS = {
    "codes": "codes",
    "scales": "scales",
    "ids": "indices",
    "centroids": "centroids",
    "basis": "correction basis",
    "coefficients": "corrections",
    "outliers": "outliers",
    "waiting": "waiting (BF16)",
    "dense": "dense (BF16)",
    "open": "open chunk (BF16)",
    "query_moment": "query statistics",
    "counters": "counters",
}
HELD, TRANSIENT = "held at the end", "more at the peak"
# Colour of the style sheet and opacity: BF16 tokens are shades of the original's grey, and a part
# looks the same on every page. Others take what is left.
LOOKS = {
    "waiting (BF16)": (0, 1.0),
    "open chunk (BF16)": (0, 0.7),
    "dense (BF16)": (0, 0.45),
    "codes": (3, 1.0),
    "scales": (1, 1.0),
    "centroids": (5, 1.0),
    "indices": (4, 1.0),
    "corrections": (2, 1.0),
    "correction basis": (2, 0.55),
    "outliers": (7, 0.55),
    "query statistics": (6, 1.0),
    "counters": (6, 0.55),
    HELD: (3, 1.0),
    TRANSIENT: (0, 0.18),
}
OTHER = (7, 1.0)


def memory_by_part(rows: Sequence[Row], prefix: str = "memory") -> str:
    """One bar a method, in MiB; the noise floor's cache is the original's and has none.

    Behind what is held stands, faintly, what the highest moment needed beyond it.
    """
    shown = [row for row in rows if row["method"] != FLOOR]
    stacks = [parts_of(row, has_parts(shown)) for row in shown]
    found = {name for stack in stacks for name in stack}
    order = [*WORDS.values(), HELD]
    last = [TRANSIENT] if TRANSIENT in found else []
    names = [n for n in order if n in found] + sorted(found - {*order, TRANSIENT}) + last
    height = 1.2 + 0.4 * len(shown) + 0.2 * ((len(names) - 1) // 4)
    figure, axes = plots.blank_figure(6.6, height, "")
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=plots.LINE, linewidth=0.8)
    for index, stack in enumerate(stacks):
        start = 0.0
        for name in (name for name in names if name in stack):
            size = stack[name] / 2**20
            series, opacity = LOOKS.get(name, OTHER)
            color = plots.colour_of(series)
            axes.barh(-index, size, height=0.62, left=start, color=color, alpha=opacity)
            start += size
        axes.annotate(_total(stack), (start, -index), xytext=(5, 0), textcoords="offset points",
                      va="center", color=plots.DIM, fontsize=9)  # fmt: skip
    for name in names:
        series, opacity = LOOKS.get(name, OTHER)
        axes.barh(0, 0, color=plots.colour_of(series), label=name, alpha=opacity)
    axes.set_yticks(
        [-i for i in range(len(shown))], [text.method_title(r["method"]) for r in shown]
    )
    axes.set_xlabel("MiB a walk")
    columns = 3 if len(names) > 8 else min(4, len(names))  # four of many are too wide
    axes.legend(frameon=False, fontsize=9, labelcolor=plots.DIM, ncols=columns,
                loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.0)  # fmt: skip
    axes.margins(x=0.16)
    return plots.inline_svg(figure, prefix, "Memory of each cache by part")


def has_parts(rows: Sequence[Row]) -> bool:
    """Whether every row says what its bytes are made of."""
    return all(row.get(PARTS) for row in rows)


def parts_of(row: Row, by_part: bool) -> dict[str, float]:
    """Bytes of a row by the words that the legend uses, empty parts left out."""
    held = row["resident_bytes"]
    parts = {HELD: held}
    if by_part:
        parts = {WORDS.get(name, name.replace("_", " ")): n for name, n in row[PARTS].items()}
    parts[TRANSIENT] = max(0, row["peak_bytes"] - held)
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def about_memory(rows: Sequence[Row]) -> str:
    """How to read the bars."""
    peak = (
        " The faint end of a bar is what the cache and its temporary buffers (dense views, "
        "scratch) need on top of that at their highest moment."
    )
    if has_parts([row for row in rows if row["method"] != FLOOR]):
        return (
            "Bytes of the tensors that the cache of one walk holds at its end. Tokens that wait "
            "for their span, stay dense or belong to the open chunk are in BF16 with every method."
            + peak
        )
    return f"Bytes that the cache of one walk holds at its end.{peak}"


def memory_columns(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """The figure as text: a name and a value in MiB a row, for a table that can be copied."""
    shown = [row for row in rows if row["method"] != FLOOR]
    stacks = [parts_of(row, has_parts(shown)) for row in shown]
    names = [n for n in (*LOOKS, *sorted({n for s in stacks for n in s} - LOOKS.keys()))
             if any(n in stack for stack in stacks)]  # fmt: skip
    return [
        (name, [f"{stack[name] / 2**20:.3f}" if name in stack else "–" for stack in stacks])
        for name in names
    ]


def _total(stack: Mapping[str, float]) -> str:
    held = sum(nbytes for name, nbytes in stack.items() if name != TRANSIENT)
    more = f" + {_short(stack[TRANSIENT])}" if TRANSIENT in stack else ""
    return f"{_short(held)}{more}"


def _short(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"
