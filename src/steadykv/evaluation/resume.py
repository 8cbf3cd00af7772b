"""``progress.json``: what an interrupted comparison needs to go on, and when it may.

A batch of one method is finished once ``progress.json`` lists it; its rollouts are written to
``rollouts.json`` before that. Going on needs the sums behind the costs (a row's ratios would not
add up to the same bits), the plan, and where it ran: only then are the rows those of a run that was
never interrupted.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steadykv.errors import ConfigError, PayloadError
from steadykv.evaluation.aggregate import RolloutRecord
from steadykv.evaluation.result_checks import check_records
from steadykv.evaluation.results import ROLLOUTS_FILE, SHIFT_FILE, as_read, read_json, write_json
from steadykv.evaluation.rollouts import BatchCost

__all__ = ["PROGRESS_FILE", "Progress", "new_run", "read_records"]

PROGRESS_FILE = "progress.json"
PROGRESS_VERSION = 1
NAMED = 3  # differences that a refusal spells out


def new_run() -> str:
    """A name for a run that no other one has: its start in UTC, and eight random hex digits."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"


@dataclass
class Progress:
    """Finished batches of a comparison.

    plan: everything that decides its numbers, JSON-able. environment: versions, commit and device.
    arguments: the command line, for a front end that goes on with it. batches: (method, number of
    the first rollout, cost) in the order in which they were finished.
    """

    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    arguments: Sequence[str] = ()
    run: str = field(default_factory=new_run)
    batches: list[tuple[str, int, BatchCost]] = field(default_factory=list)

    def has(self, method: str, first: int) -> bool:
        """Whether the batch of ``method`` that starts with rollout ``first`` is finished."""
        return any((name, start) == (method, first) for name, start, _ in self.batches)

    def write(self, folder: Path) -> None:
        """Write ``progress.json``, atomically."""
        entries = [
            {"method": method, "first": first, "cost": asdict(cost)}
            for method, first, cost in self.batches
        ]
        found = {"version": PROGRESS_VERSION, **asdict(self), "batches": entries}
        write_json(folder / PROGRESS_FILE, found)

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """The progress that ``folder`` holds.

        Raises ConfigError where there is none, PayloadError where it is not what it should be.
        """
        path = folder / PROGRESS_FILE
        if not path.is_file():
            raise ConfigError(
                f"{folder} holds no {PROGRESS_FILE}, expected the folder of a comparison that "
                "finished at least one method: start a new one"
            )
        found = read_json(path)
        try:
            if found["version"] != PROGRESS_VERSION:
                raise PayloadError(
                    f"{path} has version {found['version']}; expected {PROGRESS_VERSION}: go on "
                    "with the release that wrote it"
                )
            batches = [(b["method"], b["first"], _cost(b["cost"])) for b in found["batches"]]
            return cls(
                found["plan"], found["environment"], found["arguments"], found["run"], batches
            )
        except (KeyError, TypeError) as error:
            wrong = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise PayloadError(
                f"{path} is no progress of a comparison ({wrong}); start a new run"
            ) from error

    def check(self, plan: Mapping[str, Any], environment: Mapping[str, Any], folder: Path) -> None:
        """Refuse to go on with another plan or elsewhere. Raises ConfigError, naming what."""
        stored = {"plan": self.plan, "environment": self.environment}
        asked = as_read({"plan": plan, "environment": environment})
        differing = list(_differences(stored, asked))
        if differing:
            more = len(differing) - NAMED
            rest = f", and {more} more" if more > 0 else ""
            raise ConfigError(
                f"{folder} was begun with another configuration: {', '.join(differing[:NAMED])}"
                f"{rest}; expected the same one: give the options of its first command, or start "
                "a new folder"
            )

    def records(self, folder: Path, plan: Sequence[tuple[str, int]]) -> list[list[RolloutRecord]]:
        """The rollouts of every finished batch; ``plan`` is (episode, seed) of all rollouts.

        Rollouts in ``rollouts.json`` whose batch is not listed are left out: they run again.
        Raises PayloadError when one is missing.
        """
        path = folder / ROLLOUTS_FILE
        known = {(r.method, r.episode, r.seed): r for r in read_records(path)}
        result = []
        for method, first, cost in self.batches:
            keys = [(method, *rollout) for rollout in plan[first : first + cost.rollouts]]
            missing = [key for key in keys if key not in known]
            if missing or len(keys) != cost.rollouts:
                raise PayloadError(
                    f"{path} lacks rollouts that {PROGRESS_FILE} lists, of {method} from number "
                    f"{first + 1} on; start a new run"
                )
            result.append([known[key] for key in keys])
        return result

    def shift(self, folder: Path) -> dict[str, Any]:
        """What ``token_shift.json`` holds. Raises PayloadError when it is gone."""
        found: dict[str, Any] = read_json(folder / SHIFT_FILE)
        return found


def _cost(found: Mapping[str, Any]) -> BatchCost:
    """Raises KeyError for a part that is missing; parts that a later release adds are ignored."""
    every = fields(BatchCost)
    needed = [e.name for e in every if e.default is MISSING and e.default_factory is MISSING]
    known = {entry.name for entry in every} & set(found)
    return BatchCost(**{name: found[name] for name in [*needed, *(known - set(needed))]})


def read_records(path: Path) -> list[RolloutRecord]:
    """The rollouts of a ``rollouts.json``; unknown fields are ignored. Raises PayloadError."""
    found = read_json(path)
    names = [entry.name for entry in fields(RolloutRecord)]
    records = []
    try:
        for entry in found:
            values: dict[str, Any] = {name: entry[name] for name in names}
            values |= {name: tuple(v) for name, v in values.items() if isinstance(v, list)}
            for name, kind in (("method", str), ("episode", str), ("seed", int)):
                if not isinstance(values[name], kind):
                    raise TypeError(f"{name} is {values[name]!r}")
            records.append(RolloutRecord(**values))
    except (KeyError, TypeError) as error:
        raise PayloadError(
            f"{path} is no list of rollouts ({type(error).__name__}: {error}); expected what "
            "compare wrote"
        ) from error
    check_records(records, str(path))
    return records


def _differences(stored: Any, asked: Any, name: str = "") -> list[str]:
    """Fields that differ, as "seeds is [0, 1], there [0]"."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        found = []
        for key in dict.fromkeys([*stored, *asked]):
            inner = f"{name}.{key}" if name else key
            found += _differences(stored.get(key), asked.get(key), inner)
        return found
    if stored == asked:
        return []
    short = name.removeprefix("plan.").removeprefix("configuration.")
    return [f"{short} is {_brief(asked)}, there {_brief(stored)}"]


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
