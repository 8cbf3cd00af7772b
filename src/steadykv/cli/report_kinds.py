"""`steadykv report` for measurements, captured tensors and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadykv.errors import SteadyKVError

if TYPE_CHECKING:
    from rich.console import Console

    from steadykv.evaluation.merge_kinds import KindGroup, KindRun
    from steadykv.report.video import Frames


def merged_data(kind: str, groups: Sequence[KindGroup]) -> dict[str, Any]:
    """What ``merged.json`` holds."""
    found = [
        {
            "runs": {run.label: str(run.folder) for run in group.runs},
            "same": group.same,
            "notes": group.notes,
            "rows": group.rows,
        }
        for group in groups
    ]
    return {"version": 1, "kind": kind, "groups": found}


def films_of(group: KindGroup) -> tuple[list[Frames], int]:
    """The worst part of the reference and of each judged video, read from their files again.

    And the frame of the reference that they begin with. No films, and a note of the group, where a
    file is gone or no longer what was measured.
    """
    from steadykv.evaluation.video_excerpt import ExcerptOptions, worst_start

    data = [run.data for run in group.runs]
    size = data[0]["width"], data[0]["height"]
    most = max(1, 2 * ExcerptOptions().count(*size) // (len(data) + 1))
    lists = [found["by_frame"].get("flicker_error", []) for found in data]
    first = worst_start([max(x or 0.0 for x in step) for step in zip(*lists, strict=False)], most)
    films: list[Frames] = []
    try:
        for run in group.runs:
            pair = _part(run, first, most)
            films += pair if not films else pair[1:]
    except (SteadyKVError, OSError) as error:
        group.notes.append(f"There are no players: {error}.")
        return [], 0
    return films, int(data[0]["start"]) + first


def _part(run: KindRun, first: int, most: int) -> list[Frames]:
    from steadykv.errors import ConfigError
    from steadykv.evaluation.fingerprint import file_hash
    from steadykv.evaluation.video_excerpt import Excerpt, ExcerptOptions
    from steadykv.evaluation.video_pair import PairOptions

    data = run.data
    paths = [str(source["path"]) for source in data["sources"]]
    for source, path in zip(data["sources"], paths, strict=True):
        if source.get("sha256") != file_hash(path):
            raise ConfigError(f"{path} of {run.label} is gone or has changed since it was measured")
    names = ("start", "end", "match", "shortest", "resize")
    options: dict[str, Any] = {name: data[name] for name in names if name in data}
    pairing = PairOptions(**options)
    excerpt = Excerpt((data["width"], data["height"]), ExcerptOptions(frames=most), pairing)
    excerpt.read(first, data["frames"], (paths[0], paths[1]))
    return list(excerpt.videos())


def show(kind: str, groups: Sequence[KindGroup], report: Path) -> None:
    """The table of each group, and where the page is."""
    from rich.console import Console

    from steadykv.report.merged_kinds import describe

    console = Console()
    for number, group in enumerate(groups, start=1):
        if len(groups) > 1:
            console.print(f"Group {number}: {describe(kind, group)}", highlight=False)
        _table(kind, group, console)
        for note in group.notes:
            console.print(note, style="yellow", highlight=False)
    console.print()
    console.print(f"report: {report.resolve()}", highlight=False, soft_wrap=True)


def _table(kind: str, group: KindGroup, console: Console) -> None:
    if kind == "tensors":
        from steadykv.report.tensor_measures import tensor_table

        console.print(tensor_table(group.rows, console.width))
    elif kind == "bench":
        from steadykv.report.bench import bench_table

        console.print(bench_table(group.rows))
    else:
        from steadykv.report.measure_table import runs_table

        console.print(runs_table(group.rows))
