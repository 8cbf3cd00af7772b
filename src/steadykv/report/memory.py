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
    "waiting": "waiting (BF16)",
    "dense": "dense (BF16)",
    "open": "open chunk (BF16)",
    "query_moment": "query statistics",
}
HELD, TRANSIENT = "held at the end", "more at the peak"


def memory_by_part(rows: Sequence[Row], prefix: str = "memory") -> str:
    """One bar a method, in MiB; the noise floor's cache is the original's and has none."""
    shown = [row for row in rows if row["method"] != FLOOR]
    stacks = [parts_of(row, has_parts(shown)) for row in shown]
    names = list(dict.fromkeys(name for stack in stacks for name in stack))
    height = 1.2 + 0.4 * len(shown) + 0.2 * ((len(names) - 1) // 4)
    figure, axes = plots.blank_figure(6.6, height, "")
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=plots.LINE, linewidth=0.8)
    for index, stack in enumerate(stacks):
        start = 0.0
        for name, nbytes in stack.items():
            size = nbytes / 2**20
            faint = 0.35 if name == TRANSIENT else 1.0
            number = 1 if name == TRANSIENT else 1 + names.index(name)
            color = plots.colour_of(number)
            axes.barh(-index, size, height=0.62, left=start, color=color, alpha=faint)
            start += size
        total = " + ".join(_short(n) for n in stack.values()) if TRANSIENT in stack else (
            _short(sum(stack.values())))  # fmt: skip
        axes.annotate(total, (start, -index), xytext=(5, 0), textcoords="offset points",
                      va="center", color=plots.DIM, fontsize=9)  # fmt: skip
    for number, name in enumerate(names, 1):
        is_faint = name == TRANSIENT
        axes.barh(0, 0, color=plots.colour_of(1 if is_faint else number), label=name,
                  alpha=0.35 if is_faint else 1.0)  # fmt: skip
    axes.set_yticks(
        [-i for i in range(len(shown))], [text.method_title(r["method"]) for r in shown]
    )
    axes.set_xlabel("MiB a walk")
    axes.legend(frameon=False, fontsize=9, labelcolor=plots.DIM, ncols=min(4, len(names)),
                loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.0)  # fmt: skip
    axes.margins(x=0.16)
    return plots.inline_svg(figure, prefix, "Memory of each cache by part")


def has_parts(rows: Sequence[Row]) -> bool:
    """Whether every row says what its bytes are made of."""
    return all(row.get(PARTS) for row in rows)


def parts_of(row: Row, by_part: bool) -> dict[str, float]:
    """Bytes of a row by the words that the legend uses, empty parts left out."""
    if by_part:
        parts = {WORDS.get(name, name.replace("_", " ")): n for name, n in row[PARTS].items()}
        return {name: nbytes for name, nbytes in parts.items() if nbytes}
    held = row["resident_bytes"]
    return {HELD: held, TRANSIENT: max(0, row["peak_bytes"] - held)}


def about_memory(rows: Sequence[Row]) -> str:
    """How to read the bars."""
    if has_parts([row for row in rows if row["method"] != FLOOR]):
        return (
            "Bytes of the tensors that the cache of one walk holds at its end. Tokens that wait "
            "for their span, stay dense or belong to the open chunk are in BF16 with every method."
        )
    return (
        "Bytes that the cache of one walk holds at its end, and what it and its temporary buffers "
        "need on top of that at their highest moment."
    )


def _short(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"
