"""Several finished comparisons side by side: grouped by what they were judged on, never mixed.

Rows stand in one table only if every rollout had the same reference: the same network, walks,
noise, frames and windows. Everything else (devices, versions, batch sizes) may differ and is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.aggregate import RolloutRecord, paired_difference
from steadykv.evaluation.merge_kinds import SAID_ENVIRONMENT, labelled, said
from steadykv.evaluation.protocol import FLOORS, FrameWindow
from steadykv.evaluation.result_checks import (
    check_curves,
    check_records,
    check_shift,
    shown_as_one_line,
)
from steadykv.evaluation.results import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    SCHEMA_VERSION,
    SHIFT_FILE,
    Row,
    read_json,
    read_metrics,
)
from steadykv.evaluation.resume import read_records
from steadykv.evaluation.verdict import Judge

__all__ = ["Group", "Run", "merge", "read_runs"]

SAME_FIELDS = (
    "frames", "context_frames", "episodes", "seeds", "first_packed_frame", "windows",
    "psnr_ceiling_db", "ssim_channels", "key_rope", "world", "world_dtype", "world_sha256",
    "walks_sha256",
)  # fmt: skip
"""Of ``configuration``: they make the reference and the windows, so rows of a table share them."""
SAME_POLICY = ("window_frames", "sink_frames")
SAID_FIELDS = {
    "shift": "how the token shift was sampled",
    "max_batch": "rollouts a batch",
    "confidence": "the confidence of their intervals",
    "resamples": "bootstrap resamples",
}


@dataclass(frozen=True)
class Run:
    """One result folder: rows as in ``metrics.json``, rollouts by method."""

    label: str
    folder: Path
    rows: list[Row]
    records: dict[str, list[RolloutRecord]]

    @property
    def protocol(self) -> dict[str, Any]:
        """What rows of one table must share; a hash that an old run lacks is None."""
        shared = self.rows[0]["configuration"]
        policy = shared["cache"]["policy"]
        return {name: shared.get(name) for name in SAME_FIELDS} | {
            name: policy[name] for name in SAME_POLICY
        }


@dataclass
class Group:
    """Runs with the same reference.

    rows: as in ``metrics.json``, with ``run`` (label) added and differences and verdicts computed
    anew over all of them. origin: method of a row -> (run, its name there). floors: rollouts of
    noise floors that have no row, since another run's is shown; a difference has to be beyond them
    too. notes: what a reader of the table has to know.
    """

    protocol: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    records: dict[str, list[RolloutRecord]] = field(default_factory=dict)
    origin: dict[str, tuple[Run, str]] = field(default_factory=dict)
    floors: dict[str, list[RolloutRecord]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def windows(self) -> list[FrameWindow]:
        """Shortest first, as everywhere."""
        found = [FrameWindow(start, end) for start, end in self.protocol["windows"].values()]
        return sorted(found, key=lambda window: window.end)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Result folders of compare or demo.

    Raises ConfigError for a folder that is named twice and PayloadError for one that is none.
    """
    runs = []
    for label, folder in labelled(folders):
        rows = read_metrics(folder)
        records: dict[str, list[RolloutRecord]] = {}
        for record in read_records(folder / ROLLOUTS_FILE):
            records.setdefault(record.method, []).append(record)
        counts = {row["method"]: row["n_rollouts"] for row in rows}
        if not rows or counts != {name: len(found) for name, found in records.items()}:
            raise PayloadError(
                f"{folder}: rows and rollouts do not belong together; expected a folder as compare "
                "or demo left it"
            )
        run = Run(label, folder, rows, records)
        with shown_as_one_line(str(folder / METRICS_FILE)):
            frames = check_curves(rows, str(folder / METRICS_FILE))
            _ = run.protocol, Group(run.protocol).windows
        check_records([r for found in records.values() for r in found],
                      str(folder / ROLLOUTS_FILE), frames)  # fmt: skip
        shift = folder / SHIFT_FILE
        if shift.is_file():
            check_shift(read_json(shift), str(shift), SCHEMA_VERSION, frames)
        runs.append(run)
    return runs


def merge(runs: Sequence[Run], against: str | None = None) -> list[Group]:
    """Groups of runs with the same reference, in the order in which they first appear.

    ``against``: the method whose paired differences are computed (default: the runs' own, where
    all of a group name the same). Raises ConfigError for one that no run has.
    """
    groups: list[Group] = []
    for run in runs:
        group = next((g for g in groups if g.protocol == run.protocol), None)
        if group is None:
            group = Group(run.protocol)
            groups.append(group)
        _add(group, run)
    known = [method for group in groups for method in group.records]
    if against is not None and against not in known:
        raise ConfigError(
            f"--paired: got {against!r}, expected one of {', '.join(dict.fromkeys(known))}"
        )
    for group in groups:
        _judge(group, against)
        group.notes += _differing(group)
        if group.protocol["world_sha256"] is None and len(group.runs) > 1:
            group.notes.append(
                "These runs recorded no hash of their network: that it was the same is assumed."
            )
    return groups


def differing_fields(groups: Sequence[Group]) -> list[str]:
    """Names of protocol fields in which any two groups differ."""
    first = groups[0].protocol
    return [name for name in first if any(g.protocol[name] != first[name] for g in groups[1:])]


def _add(group: Group, run: Run) -> None:
    group.runs.append(run)
    for row in run.rows:
        name = row["method"]
        if row["n_rollouts"] < row["planned_rollouts"]:
            group.notes.append(
                f"{run.label} is unfinished: {name} has {row['n_rollouts']} of "
                f"{row['planned_rollouts']} rollouts."
            )
        shown = name
        if name in group.records:
            other = group.origin[name][0].label
            if _same(group, name, row, run):
                if row["keys"] != "bf16" or row["values"] != "bf16":
                    group.notes.append(
                        f"{name} is in {other} and {run.label} with the same rollouts: shown once."
                    )
                _take_shift(group, name, row, run)
                continue
            if name in FLOORS:
                group.floors[f"{name}@run={run.label}"] = run.records[name]
                group.notes.append(
                    f"The noise floor of {run.label} ({row['psnr']:.2f} dB) is not that of "
                    f"{other}, which is shown: a difference has to be beyond both."
                )
                continue
            shown = f"{name}{'+' if '@' in name.rpartition(':')[2] else '@'}run={run.label}"
            group.notes.append(
                f"{name} is in {other} and {run.label} with other rollouts: the latter is {shown}."
            )
        group.rows.append({**row, "method": shown, "run": run.label})
        group.records[shown] = run.records[name]
        group.origin[shown] = (run, name)


def _same(group: Group, name: str, row: Row, run: Run) -> bool:
    """Whether a method of two runs is the same cache with the same rollouts.

    The token shift is measured beside the rollouts, by sampling: it takes no part.
    """
    (shown,) = [found for found in group.rows if found["method"] == name]
    caches = [found["configuration"]["cache"] for found in (shown, row)]
    videos = [
        [replace(record, top1_shift=None, top5_shift=None) for record in records]
        for records in (group.records[name], run.records[name])
    ]
    return bool(caches[0] == caches[1] and videos[0] == videos[1])


def _take_shift(group: Group, name: str, row: Row, run: Run) -> None:
    """Show ``row`` instead of the same method's earlier row if only it has a token shift."""
    (place,) = [n for n, found in enumerate(group.rows) if found["method"] == name]
    if group.rows[place]["top1_shift"] is None and row["top1_shift"] is not None:
        group.rows[place] = {**row, "run": run.label}
        group.records[name] = run.records[name]
        group.origin[name] = (run, name)


def _judge(group: Group, against: str | None) -> None:
    """Differences and verdicts over all rows of the group."""
    shared = group.rows[0]["configuration"]
    options = {"confidence": shared["confidence"], "resamples": shared["resamples"]}
    judge = Judge(
        {**group.records, **group.floors},
        group.windows,
        floors=(*FLOORS, *group.floors),
        **options,
    )
    own = {row["paired"]["against"] for row in group.rows if row["paired"]}
    if against is None and len(own) == 1:
        against = own.pop()
    for row in group.rows:
        method = row["method"]
        row["better_than"] = judge.better_than(method)
        row["paired"] = None
        if against is not None and against in group.records and method != against:
            differences = paired_difference(
                group.records[method], group.records[against], group.windows, **options
            )
            row["paired"] = {"against": against, **judge.told(method, against, differences)}


def _differing(group: Group) -> list[str]:
    """A sentence for everything in which the runs of a group differ."""
    found = []
    for part, names in (("configuration", SAID_FIELDS), ("environment", SAID_ENVIRONMENT)):
        for name, title in names.items():
            values = {run.label: run.rows[0][part].get(name) for run in group.runs}
            by_run = {
                label: _sampling(value) if name == "shift" else said(value)
                for label, value in values.items()
            }
            if len(set(by_run.values())) > 1:
                listed = "; ".join(f"{label}: {value}" for label, value in by_run.items())
                found.append(f"The runs differ in {title} ({listed}).")
    return found


def _sampling(options: Mapping[str, Any] | None) -> str:
    """`ShiftOptions` in words."""
    if options is None:
        return "not measured"
    given = {name: value for name, value in options.items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())
