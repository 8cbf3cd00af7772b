"""A plan in words: the lines above its table, and the cells of the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steadykv.planning.catalog import GIB
from steadykv.planning.planner import MethodPlan, Plan

__all__ = ["GAP", "Column", "columns", "gib", "heading", "left_out", "plain", "verdict"]

GAP = 2  # characters between columns


@dataclass(frozen=True)
class Column:
    """A column of the table. rank: those with the highest are left out where room is short."""

    title: str
    cells: tuple[str, ...]
    rank: int = 0

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))


def heading(plan: Plan) -> list[str]:
    """What was planned, with where its numbers come from."""
    model, evidence = plan.model, plan.model.evidence
    window = "all of them attended"
    if plan.condition_latents is not None:
        window = f"a cache of {plan.condition_latents} condition latents"
    elif model.window_latents is not None:
        window = f"window {model.window_latents}"
        window += f" with sink {model.sink_latents}" if model.sink_latents else ""
    lines = [
        f"{model.title}: {model.layers} layers × {model.heads} heads × {model.head_dim}"
        + (f", {model.batch} rows" if model.batch > 1 else "")
        + (f", {plan.branches} guidance branches" if plan.branches > 1 else "")
        + (f", heads split over {plan.shards} GPUs" if plan.shards > 1 else "")
        + f" ({evidence['sizes']})",
        f"{plan.resolution}: {plan.frame_tokens} tokens a latent frame ({evidence['sizes']}); "
        f"{plan.frames} frames = {plan.latents} latents in {plan.chunks} "
        f"chunk{'s' if plan.chunks > 1 else ''}, {window} ({evidence['structure']})",
        f"weights {gib(plan.weights_bytes)} GiB, {plan.weights_from}",
    ]
    if plan.dense_caches_bytes:
        titles = ", ".join(cache.title for cache in model.other_caches if cache.nbytes)
        size = gib(plan.dense_caches_bytes)
        lines.append(f"other caches {size} GiB, dense: {titles} ({evidence['structure']})")
    if plan.other_bytes:
        lines.append(f"other {gib(plan.other_bytes)} GiB, given")
    if plan.gpu is not None:
        lines.append(f"{plan.gpu.title}: {gib(plan.gpu.nbytes)} GiB ({plan.gpu.source})")
        lines.append("In GiB; longest video that fits: latent frames, frames, seconds.")
    else:
        lines.append("In GiB.")
    return lines


def columns(plan: Plan, width: int) -> list[Column]:
    """The table, all sizes in GiB; `width` is that of the terminal in characters.

    Where that is too little, the columns of highest rank are not among them; see `left_out`.
    """
    found = _all_columns(plan)
    while sum(column.width + GAP for column in found) > width:
        least = max(found, key=lambda column: column.rank)
        if not least.rank:
            break
        found.remove(least)
    return found


def left_out(plan: Plan, width: int) -> str:
    """A line that names the columns which have no room, and how to see them; or nothing."""
    shown = [column.title for column in columns(plan, width)]
    missing = [c.title for c in _all_columns(plan) if c.title not in shown]
    if not missing:
        return ""
    enough = sum(column.width + GAP for column in _all_columns(plan))
    return (
        f"no room in {width} characters for: {', '.join(missing)}; --json has all numbers, "
        f"{enough} characters (COLUMNS={enough}) the whole table"
    )


def _all_columns(plan: Plan) -> list[Column]:
    rows = plan.methods
    is_packed = plan.attention == "packed"
    read = [row.attend_bytes if is_packed else row.window_bytes for row in rows]
    found = [
        Column("cache", tuple(row.method for row in rows)),
        Column("bits", tuple(f"{row.bits_per_element:.3f}" for row in rows), 4),
        _sizes("packed", (row.payload_bytes for row in rows), 1),
        _sizes("dense", (row.dense_bytes for row in rows), 2),
        _sizes("queries", (row.statistics_bytes for row in rows), 5),
        _sizes("held", (row.resident_bytes for row in rows)),
        Column("smaller", tuple(f"{row.compression:.2f}×" for row in rows), 3),
        _sizes("attend" if is_packed else "window", read, 6),
        _sizes("packing", (row.encode_bytes for row in rows), 7),
        _sizes("peak", (row.cache_peak_bytes for row in rows)),
    ]
    if plan.gpu is not None:
        found.append(_sizes("total", (row.total_bytes for row in rows)))
        found.append(Column("verdict", tuple(verdict(row) for row in rows)))
        found.append(Column("longest video", tuple(_longest(row) for row in rows)))
    return found


def verdict(row: MethodPlan) -> str:
    """ "fits, 3.2 free" or "1.4 too much"."""
    if row.free_bytes is None:
        return "–"
    size = f"{abs(row.free_bytes) / GIB:.2f}"
    return f"fits, {size} free" if row.fits else f"{size} too much"


def plain(plan: Plan, width: int = 140) -> str:
    """The plan as text."""
    table = columns(plan, width)
    widths = [column.width for column in table]
    lines = [*heading(plan), ""]
    for cells in zip(*((column.title, *column.cells) for column in table), strict=True):
        padded = [
            cell.ljust(size) if index == 0 else cell.rjust(size)
            for index, (cell, size) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append((" " * GAP).join(padded).rstrip())
    notes = filter(None, (left_out(plan, width), *plan.notes))
    return "\n".join([*lines, "", *notes])


def gib(nbytes: int) -> str:
    """ "3.625", without the unit."""
    return f"{nbytes / GIB:.3f}"


def _sizes(title: str, sizes: Iterable[int], rank: int = 0) -> Column:
    return Column(title, tuple(map(gib, sizes)), rank)


def _longest(row: MethodPlan) -> str:
    if row.longest_latents is None:
        return "any length"
    if not row.longest_latents:
        return "none"
    return f"{row.longest_latents}, {row.longest_frames}, {row.longest_seconds:.1f}"
