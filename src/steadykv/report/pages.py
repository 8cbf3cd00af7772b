"""The report of one comparison: the same builder serves a single walk and many episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steadykv.config import METHODS
from steadykv.evaluation.metrics import psnr_by_frame
from steadykv.evaluation.protocol import FLOOR, FLOORS
from steadykv.report import html, plots, text
from steadykv.report.memory import about_memory, memory_by_part
from steadykv.report.tables import memory_table, number_table, paired_table
from steadykv.report.theatre import Film, players
from steadykv.report.video import Frames

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """What a page is made of.

    rows: as in ``metrics.json``. videos: method -> uint8 [T, H, W, 3] of one rollout, "bf16" among
    them; mp4: the same as encoded files, by method. shift: what ``token_shift.json`` holds.
    fps: of the players. command: as the user typed it.
    """

    rows: Sequence[Row]
    videos: Mapping[str, Frames]
    mp4: Mapping[str, bytes]
    shift: Mapping[str, Any] | None
    fps: int
    command: str
    shown: str = ""  # which rollout the videos are, where there are several
    series: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        methods = dict.fromkeys(["bf16", *(row["method"] for row in self.rows)])
        names = [method for method in methods if method not in FLOORS]
        object.__setattr__(self, "series", {name: index for index, name in enumerate(names)})

    @property
    def configuration(self) -> Mapping[str, Any]:
        """What all rows share."""
        shared: Mapping[str, Any] = self.rows[0]["configuration"]
        return shared

    @property
    def has_intervals(self) -> bool:
        """Whether several episodes were run."""
        return any(row["intervals"] is not None for row in self.rows)


def report_page(report: Report) -> str:
    """The whole page as one HTML document that needs no other file and no network."""
    rows, shared = report.rows, report.configuration
    count = len(text.packed_rows(rows)) + 1
    body = []
    if report.videos:
        body.append(players(films(report), report.fps, shared["context_frames"]))
    if report.shown:
        body.append(html.paragraphs([report.shown], "note"))
    against = next((row["paired"]["against"] for row in rows if row["paired"]), None)
    paired = []
    if against is not None:
        paired = [
            html.heading(f"Differences to {text.method_title(against)}"),
            html.paragraphs([text.about_pairs(against)]),
            paired_table(rows, report.series, against),
        ]
    body += [
        html.heading("What you are looking at"),
        html.paragraphs(
            text.what_it_is(rows, shared["first_packed_frame"], shared["context_frames"])
        ),
        html.heading("In numbers"),
        html.paragraphs(text.about_table(rows), "note"),
        number_table(rows, report.series),
        *paired,
        html.heading("Frame by frame"),
        html.paragraphs([text.about_psnr(rows), *([text.FOLLOWS] if report.videos else [])]),
        html.figure(plots.psnr_by_frame(curves(report), shared["context_frames"])),
    ]
    if text.packed_rows(rows):
        body += [
            html.heading("Quality against size"),
            html.paragraphs([text.about_sizes(rows)]),
            html.figure(size_plot(report)),
        ]
    body += [
        html.heading("Memory by part"),
        html.paragraphs([about_memory(rows)]),
        html.figure(memory_by_part(rows)),
        memory_table(rows, report.series),
    ]
    example = (report.shift or {}).get("example")
    if example is not None and "bf16" in report.videos:
        body += [
            html.heading("Where the network looks"),
            html.paragraphs([text.about_shift(example)]),
            html.looks(shift_looks(report, example)),
        ]
    body += [
        html.heading("How this was made"),
        html.command_line(report.command),
        html.facts(made_how(report)),
    ]
    return html.page(
        title=f"steadykv: {text.listed([text.method_title(m) for m in report.series])}",
        headline=text.headline(rows, count),
        lead=text.lead(rows),
        body=body,
        footer="All bits and bytes are counted from the tensors that were really stored.",
    )


def films(report: Report) -> list[Film]:
    """One player a method; the noise floor looks like the original and gets none."""
    original = report.videos["bf16"]
    context = report.configuration["context_frames"]
    by_method = {row["method"]: row for row in report.rows}
    result = []
    for method, series in report.series.items():
        if method in report.videos:
            frames = report.videos[method]
            result.append(
                Film(
                    title=text.method_title(method),
                    caption=text.short_caption(by_method.get(method)),
                    frames=frames,
                    mp4=report.mp4[method],
                    series=series,
                    psnr=psnr_by_frame(original, frames).tolist()[context:],
                )
            )
    return result


def curves(report: Report) -> list[plots.Curve]:
    """PSNR by generated frame of every method that packs something, and of the noise floor."""
    context = report.configuration["context_frames"]
    result = []
    for row in report.rows:
        if text.is_dense(row) and row["method"] not in FLOORS:
            continue
        low = high = None
        if row["intervals"] is not None:
            bounds = np.array(row["intervals"]["psnr_by_frame"])[context:]
            low, high = bounds[:, 0].tolist(), bounds[:, 1].tolist()
        result.append(
            plots.Curve(
                label=text.method_title(row["method"]),
                mean=row["psnr_by_frame"][context:],
                colour=report.series.get(row["method"]),
                low=low,
                high=high,
            )
        )
    return result


def size_plot(report: Report, prefix: str = "bits") -> str:
    """PSNR over the longest window against bits per element, with the intervals there are."""
    points = []
    for row in text.packed_rows(report.rows):
        low, high = (row["intervals"] or {}).get("psnr", (None, None))
        points.append(
            plots.Point(
                text.method_title(row["method"]),
                row["bits_per_element"],
                row["psnr"],
                report.series[row["method"]],
                low,
                high,
            )
        )
    floor = next((row["psnr"] for row in report.rows if row["method"] == FLOOR), None)
    return plots.quality_by_bits(points, floor, prefix)


def shift_looks(report: Report, example: Mapping[str, Any]) -> list[html.Look]:
    """The asking patch and what each cache selects for it, all in frames of the original."""
    frames = report.videos["bf16"]
    patch = report.configuration["world"]["patch"]

    def look(
        title: str,
        caption: str,
        place: Mapping[str, int],
        series: int | None,
        is_same: bool | None = None,
    ) -> html.Look:
        return html.Look(
            title=title,
            caption=caption,
            frame=frames[place["frame"]],
            box=(place["patch_column"] * patch, place["patch_row"] * patch, patch, patch),
            series=series,
            number=place["frame"],
            is_same=is_same,
        )

    query, chosen = example["query"], example["selected"]
    where = f"frame {query['frame']}, layer {example['layer']}, head {example['head']}"
    result = [look("The asking patch", where, query, None)]
    for method, series in report.series.items():
        place = chosen.get(method)
        if place is None:
            continue
        title = text.method_title(method)
        caption = f"frame {place['frame']}"
        if method == "bf16":
            weight = f"{100 * example['attention_weight']:.0f} % of the attention to packed patches"
            result.append(look(title, f"{caption}, {weight}", place, series))
            continue
        is_same = place["token"] == chosen["bf16"]["token"]
        result.append(look(title, caption, place, series, is_same))
    return result


def made_how(report: Report) -> dict[str, str]:
    """Configuration, versions and commit, as names and values."""
    shared, environment = report.configuration, report.rows[0]["environment"]
    policy = shared["cache"]["policy"]
    centroids = {
        row["configuration"]["cache"][side]["centroids"]
        for row in text.packed_rows(report.rows)
        for side in ("keys", "values")
        if "centroids" in METHODS.get(row[side], ())
    }
    world = shared["world"]
    window = policy["window_frames"]
    entries = {
        "episodes": _some(shared["episodes"]),
        "noise seeds": ", ".join(map(str, shared["seeds"])),
        "rollouts a method": str(report.rows[0]["n_rollouts"]),
        "frames": f"{shared['context_frames']} given, {shared['frames']} generated, "
        f"the first that reads packed data is {shared['first_packed_frame']}",
        "packed together": f"{policy['span_chunks']} chunks of {world['chunk_frames']} frames",
        "attended": "all frames" if window is None else f"the last {window} frames",
        "centroids": ", ".join(map(str, sorted(centroids))) or "none",
        "keys are stored": f"{'after' if shared['key_rope'] == 'post' else 'before'} RoPE",
        "network": f"{world['num_layers']} layers, {world['num_heads']} heads of "
        f"{world['head_dim']}, computed in {shared['world_dtype']}",
        **html.versions(environment),
    }
    if report.has_intervals:
        entries["intervals"] = (
            f"{100 * shared['confidence']:.0f} %, {shared['resamples']:,} bootstrap resamples over "
            "episodes (each brings all its seeds)"
        )
    return entries


def _some(names: Sequence[str]) -> str:
    if len(names) <= 6:
        return ", ".join(names)
    return f"{len(names)}, from {names[0]} to {names[-1]}"


def side_captions(report: Report) -> dict[str, list[str]]:
    """The lines under each tile of the side-by-side video, in the order of the tiles."""
    by_method = {row["method"]: row for row in report.rows}
    floor = by_method.get(FLOOR)
    captions = {}
    for method in report.series:
        if method in report.videos:
            row = by_method.get(method)
            captions[method] = [text.method_title(method), text.short_caption(row)]
            if row is not None and not text.is_dense(row):
                captions[method].append(f"{text.closeness(row, floor)}")
    return captions
