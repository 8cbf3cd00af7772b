"""The tables of `steadykv plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.table import Table

from steadykv.planning import Plan
from steadykv.planning.catalog import Gpu, Model
from steadykv.planning.text import GAP, columns, gib

__all__ = ["gpu_table", "model_table", "plan_table"]


def plan_table(plan: Plan, width: int) -> Table:
    """Every method's bytes in GiB, and whether they fit; `width` is that of the terminal."""
    table = _table()
    shown = columns(plan, width)
    needed = sum(column.width + GAP for column in shown) - GAP  # none behind the last one
    fits = needed <= width  # else cells are wrapped, not cut off
    for number, column in enumerate(shown):
        side: Literal["left", "right"] = "right" if number else "left"
        table.add_column(column.title, justify=side, no_wrap=fits, overflow="fold")
    verdicts = [column.title for column in shown].index("verdict") if plan.gpu else None
    for number, row in enumerate(plan.methods):
        cells = [column.cells[number] for column in shown]
        if verdicts is not None:
            color = "green" if row.fits else "red"
            cells[verdicts] = f"[{color}]{cells[verdicts]}[/{color}]"
        table.add_row(*cells)
    return table


def model_table(models: Sequence[Model]) -> Table:
    """The models that can be planned."""
    table = _table()
    table.add_column("model", no_wrap=True)
    table.add_column("also known as")
    table.add_column("resolutions")
    table.add_column("evidence", no_wrap=True)
    for model in models:
        sure = f"{model.evidence['structure']}, {model.evidence['sizes']}"
        table.add_row(model.id, ", ".join(model.aliases), ", ".join(model.frame_tokens), sure)
    return table


def gpu_table(gpus: Sequence[Gpu]) -> Table:
    """The GPUs that are known by name."""
    table = _table()
    table.add_column("gpu", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("source", overflow="fold")
    for gpu in gpus:
        table.add_row(gpu.id, gib(gpu.nbytes), gpu.source)
    return table


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
