"""Result folders of any command: which kind each is, and which of a kind share a table.

Comparisons have rules of their own (`steadykv.evaluation.merge`). Measurements stand in one table
if they have the same frames of the same reference, tensors if the captured file is the same, times
if the device and the shape are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.measure_checks import check_measurement
from steadykv.evaluation.result_checks import check_object, expect, shown_as_one_line
from steadykv.evaluation.results import METRICS_FILE, SCHEMA_VERSION, read_json

__all__ = [
    "COMPARISON",
    "SAID_ENVIRONMENT",
    "KindGroup",
    "KindRun",
    "common_kind",
    "group_runs",
    "labelled",
    "said",
]

COMPARISON = "comparison"
FILES = {
    COMPARISON: METRICS_FILE,
    "measure": "measure.json",
    "tensors": "tensors.json",
    "bench": "bench.json",
}
BENCH_VERSION = 1
MACHINE = "machine"  # the method of a benchmark's rows about the machine itself


@dataclass(frozen=True)
class KindRun:
    """One result folder and the JSON object that its command wrote."""

    label: str
    folder: Path
    data: Mapping[str, Any]


@dataclass
class KindGroup:
    """Runs that share what `same` says, in one table. notes: what a reader of it has to know."""

    same: dict[str, Any]
    runs: list[KindRun] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def labelled(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """A label for each folder: its name, numbered where names repeat.

    Raises ConfigError for a folder that is named twice.
    """
    places = [folder.resolve() for folder in folders]
    if len(set(places)) != len(places):
        twice = next(f for f, place in zip(folders, places, strict=True) if places.count(place) > 1)
        raise ConfigError(f"got {twice} twice, expected every run once; name it once")
    names = [re.sub(r"[^\w.-]", "-", place.name) for place in places]
    return [
        (name if names.count(name) == 1 else f"{name}.{number}", folder)
        for number, (name, folder) in enumerate(zip(names, folders, strict=True), start=1)
    ]


def common_kind(folders: Sequence[Path]) -> str:
    """The kind of all these folders.

    Raises PayloadError for one that holds no results, ConfigError for several kinds.
    """
    kinds = {folder: _kind(folder) for folder in folders}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{folder} ({kind})" for folder, kind in kinds.items())
        raise ConfigError(
            f"got runs of several kinds: {listed}; expected one kind: make a page of each"
        )
    return next(iter(kinds.values()))


def _kind(folder: Path) -> str:
    for kind, name in FILES.items():
        if (folder / name).is_file():
            return kind
    inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
    hint = f": name those in it ({', '.join(inside)})" if inside else ""
    raise PayloadError(
        f"could not read {folder}: it holds none of {', '.join(FILES.values())}; expected a result "
        f"folder of demo, compare, ablate, measure, tensors or bench{hint}"
    )


def group_runs(kind: str, folders: Sequence[Path]) -> list[KindGroup]:
    """Groups in the order in which they first appear. Raises PayloadError for a damaged file."""
    groups: list[KindGroup] = []
    for label, folder in labelled(folders):
        path = folder / FILES[kind]
        data = read_json(path)
        CHECKS[kind](data, str(path))
        with shown_as_one_line(str(path)):
            same = json.loads(json.dumps(SAME[kind](data)))
            run = KindRun(label, folder, data)
            group = next((g for g in groups if g.same == same), None)
            if group is None:
                group = KindGroup(same)
                groups.append(group)
            group.runs.append(run)
            group.rows += ROWS[kind](run, group)
    for group in groups:
        group.notes += _differing(group)
    return groups


def _check_tensors(data: Any, source: str) -> None:
    check_object(data, source, SCHEMA_VERSION)
    for name, kind in (("file", dict), ("environment", dict), ("notes", list)):
        expect(isinstance(data.get(name), kind), source, name, data.get(name), f"a {kind.__name__}")
    _check_list_of_rows(data, source, "rows", least=1)
    _check_list_of_rows(data, source, "cells", least=0)


def _check_times(data: Any, source: str) -> None:
    check_object(data, source, BENCH_VERSION)
    expect(isinstance(data.get("environment"), dict), source, "environment",
           data.get("environment"), "a dict")  # fmt: skip
    _check_list_of_rows(data, source, "rows", least=1)


def _check_list_of_rows(data: Mapping[str, Any], source: str, name: str, least: int) -> None:
    rows = data.get(name)
    fits = isinstance(rows, list) and len(rows) >= least
    expect(fits, source, name, rows, f"a list of {least} or more")
    for index, row in enumerate(rows or ()):
        fits = isinstance(row, dict) and isinstance(row.get("method"), str)
        expect(fits, source, f"{name}[{index}]", row, "an object with a method")


CHECKS = {"measure": check_measurement, "tensors": _check_tensors, "bench": _check_times}


def _measured(data: Mapping[str, Any]) -> dict[str, Any]:
    """The frames that were the reference; by content where that is known."""
    reference = data["sources"][0]
    names = ("start", "frames", "fps", "width", "height")
    return {"reference": reference.get("sha256") or reference["path"]} | {n: data[n] for n in names}


def _captured(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: data["file"][name] for name in ("name", "header", "layers", "spans", "shapes")}


def _timed(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: data["rows"][0][name] for name in ("gpu", "shape")}


SAME = {"measure": _measured, "tensors": _captured, "bench": _timed}


def _measure_rows(run: KindRun, group: KindGroup) -> list[dict[str, Any]]:
    data = run.data
    video = data["sources"][1]["path"]
    return [{"run": run.label, "video": video, "frames": data["frames"], **data["summary"]}]


TIMES = ("encode_ms", "decode_ms", "run")


def _tensor_rows(run: KindRun, group: KindGroup) -> list[dict[str, Any]]:
    """Rows under names that no other run of the group has; equal numbers are shown once."""
    taken = {row["method"]: row for row in group.rows}
    found = []
    for row in run.data["rows"]:
        name, other = row["method"], taken.get(row["method"])
        if other is not None and _without(row, TIMES) == _without(other, TIMES):
            group.notes.append(f"{name} is in {other['run']} and {run.label} with the same "
                               "numbers: shown once.")  # fmt: skip
            continue
        if other is not None:
            name = f"{name}{'+' if '@' in name.rpartition(':')[2] else '@'}run={run.label}"
            group.notes.append(f"{row['method']} of {run.label} is another than that of "
                               f"{other['run']}: here it is {name}.")  # fmt: skip
        found.append({**row, "method": name, "run": run.label})
    return found


def _without(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _bench_rows(run: KindRun, group: KindGroup) -> list[dict[str, Any]]:
    """The machine's own rates once, from the first run; a repeated work with its run's name."""
    taken = {(row["work"], row["method"]) for row in group.rows}
    found = []
    for row in run.data["rows"]:
        method = row["method"]
        if (row["work"], method) in taken:
            if method == MACHINE:
                rate = ("gb_per_s", "GB/s") if row["work"] == "copy" else ("tflop_per_s", "TFLOP/s")
                group.notes.append(
                    f"{run.label} had {row[rate[0]]:,.3g} {rate[1]} in {row['work']}; the limits "
                    "of its works are by that."
                )
                continue
            method = f"{method} run={run.label}"
        found.append({**row, "method": method, "run": run.label})
    return found


ROWS = {"measure": _measure_rows, "tensors": _tensor_rows, "bench": _bench_rows}
SAID_ENVIRONMENT = {
    "steadykv": "the version of steadykv",
    "commit": "the commit",
    "torch": "the version of torch",
    "device_name": "the device",
}


def _differing(group: KindGroup) -> list[str]:
    """A sentence for every part of the environment in which the runs differ."""
    found = []
    for name, title in SAID_ENVIRONMENT.items():
        by_run = {run.label: said(run.data["environment"].get(name)) for run in group.runs}
        if len(set(by_run.values())) > 1:
            listed = "; ".join(f"{label}: {value}" for label, value in by_run.items())
            found.append(f"The runs differ in {title} ({listed}).")
    return found


def said(value: Any) -> str:
    """A value of a run in a note; "unknown" for what it did not record."""
    return "unknown" if value is None else str(value)
