"""The result store: one JSON object a line, appended by every run and never rewritten.

A line has ``version``, ``run`` (a name that no other run has), ``kind`` (the command), ``time``
(UTC), ``command``, ``configuration``, ``environment`` and ``row``. docs/results-schema.md describes
them. A line is one write to a file opened for appending, so lines of several processes never mix.
A process that dies within a write leaves one line without its end: the next one starts on a line of
its own, and readers warn of the damaged one and keep all others.
"""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steadykv.errors import ConfigError, PayloadError, SteadyKVError
from steadykv.evaluation.resume import new_run

__all__ = [
    "STORE_FILE",
    "STORE_VARIABLE",
    "append",
    "chosen_store",
    "entries",
    "read_store",
    "record_run",
]

STORE_VERSION = 1
STORE_FILE = "runs.jsonl"
STORE_VARIABLE = "STEADYKV_STORE"

Entry = dict[str, Any]

REQUIRED_FIELDS: dict[str, type] = {
    "version": int,
    "run": str,
    "kind": str,
    "time": str,
    "command": str,
    "configuration": dict,
    "environment": dict,
    "row": dict,
}
"""Fields of a line and their JSON types. Readers ignore fields they do not know."""


def chosen_store(option: Path | None) -> Path | None:
    """The shared store: ``option``, else what STEADYKV_STORE names, else None.

    Checked before a run begins: raises ConfigError for a place where no store can be, something
    that is no regular file (reading a pipe or a device may never end), a file that is something
    else, or one that may not be written.
    """
    name = "--store"
    path = option
    if path is None:
        text = os.environ.get(STORE_VARIABLE, "")
        if not text:
            return None
        name, path = STORE_VARIABLE, Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{name}: got {path}, expected a file in a folder that exists")
    exists = _is_regular(path, name)
    if not os.access(path if exists else path.parent, os.W_OK):
        raise ConfigError(f"{name}: got {path}, which may not be written; choose another")
    if exists and not _is_store(path):
        raise ConfigError(
            f"{name}: got {path}, which is no result store; expected a new name, or what an "
            "earlier run made"
        )
    return path


def _is_regular(path: Path, name: str) -> bool:
    """Whether there is a file; False for a new name. Raises ConfigError for anything else."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():  # appending would make its target, wherever that is
            raise ConfigError(
                f"{name}: got {path}, a link to nothing; expected a file or a new name"
            ) from None
        return False
    except OSError as error:  # a loop of links, a folder that may not be searched
        raise ConfigError(
            f"{name}: got {path} ({error.strerror}); expected a file or a new name"
        ) from error
    if not stat.S_ISREG(mode):
        raise ConfigError(
            f"{name}: got {path}, which is no regular file; expected one, or a new name"
        )
    return True


def _is_store(path: Path) -> bool:
    """Whether the file is empty, or some line of its beginning could be one of a store.

    The first line may be damaged, but a file of something else has none that fits.
    """
    with path.open("rb") as file:
        lines = [line for line in file.readlines(1 << 20) if line.strip()]
    found = [_parsed(line) for line in lines]
    return not lines or any(entry is not None and "row" in entry for entry in found)


def _parsed(line: bytes) -> Entry | None:
    """The object of a line, None if it is none of a store or damaged: no strict JSON."""
    try:
        found = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # brackets without end are damage too
        return None
    return found if isinstance(found, dict) and type(found.get("version")) is int else None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def entries(
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    command: str,
    configuration: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    run: str | None = None,
) -> list[Entry]:
    """One line a row. A row's own ``configuration`` and ``environment`` move out of it
    and stand beside what all rows share.

    Raises ConfigError for a row without an environment where ``environment`` is None.
    """
    shared = {
        "version": STORE_VERSION,
        "run": run or new_run(),
        "kind": kind,
        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "command": command,
    }
    found = []
    for row in rows:
        rest = dict(row)
        own = {"configuration": configuration or {}, "environment": environment or {}}
        own = {name: {**shared_part, **rest.pop(name, {})} for name, shared_part in own.items()}
        if not own["environment"]:
            raise ConfigError(
                f"a row of {kind} has no environment; expected versions, commit and device"
            )
        found.append({**shared, **own, "row": rest})
    return found


def append(path: str | Path, lines: Sequence[Entry]) -> Path:
    """Append ``lines``, each by one write, and flush them to the disk; makes the file if absent.

    Raises ConfigError for what JSON cannot hold (NaN, infinity), before anything is written, and
    SteadyKVError when the system refuses; what stood in the file stays.
    """
    target = Path(path)
    try:
        texts = [json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a row cannot be stored: {error}; expected finite numbers, text, lists and "
            "dictionaries"
        ) from error
    try:
        handle = os.open(target, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            for text in texts:
                # A blank line too many, if another process appends meanwhile, is no harm.
                data = text if _ends_a_line(handle) else b"\n" + text
                if os.write(handle, data) != len(data):
                    raise OSError(0, "the disk is full")
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise SteadyKVError(
            f"could not append to {target}: {error.strerror or error}; free space or choose "
            "another store"
        ) from error
    return target


def _ends_a_line(handle: int) -> bool:
    size = os.fstat(handle).st_size
    return size == 0 or os.pread(handle, 1, size - 1) == b"\n"


def read_store(path: str | Path) -> list[Entry]:
    """All lines of a store, oldest first.

    A damaged line (cut off while it was written, no strict JSON, a field gone or of another type)
    is left out with a UserWarning that names it. Raises PayloadError for a file that cannot be
    read, or a line of another version.
    """
    source = Path(path)
    try:
        if not stat.S_ISREG(source.stat().st_mode):
            raise PayloadError(f"could not read {source}: it is no regular file; expected a store")
        lines = source.read_bytes().split(b"\n")
    except OSError as error:
        raise PayloadError(
            f"could not read {source}: {error.strerror}; expected a store"
        ) from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parsed(line)
        if entry is not None and entry["version"] != STORE_VERSION:
            raise PayloadError(
                f"{source}, line {number} has version {entry['version']}; expected "
                f"{STORE_VERSION}: read it with the release that wrote it"
            )
        wrong = "no whole JSON line of a store, perhaps cut off while it was written"
        if entry is not None:
            wrong = _wrong_field(entry)
        if entry is None or wrong:
            warnings.warn(f"{source}, line {number}: damaged ({wrong}); left out", stacklevel=2)
            continue
        found.append(entry)
    return found


def _wrong_field(entry: Entry) -> str:
    """The first field that is not what a line has; empty where all are."""
    for name, kind in REQUIRED_FIELDS.items():
        if name not in entry:
            return f"it lacks {name}"
        if not isinstance(entry[name], kind):
            return f"{name} is of type {type(entry[name]).__name__}, expected {kind.__name__}"
    return ""


def record_run(
    kind: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    command: str,
    folder: Path | None = None,
    store: Path | None = None,
    configuration: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    run: str | None = None,
) -> None:
    """Append a finished run to ``runs.jsonl`` of ``folder`` and to the shared ``store``.

    Either may be None. A store that has this ``run`` already is left as it is, so that finishing
    twice (a resumed run) stores once. Raises as :func:`append` and :func:`read_store`.
    """
    lines = entries(
        kind,
        rows,
        command=command,
        configuration=configuration,
        environment=environment,
        run=run,
    )
    for target in (None if folder is None else folder / STORE_FILE, store):
        if target is None:
            continue
        known = run is not None and target.exists() and _has_run(target, run)
        if not known:
            append(target, lines)


def _has_run(path: Path, run: str) -> bool:
    with path.open("rb") as file:
        return any((_parsed(line) or {}).get("run") == run for line in file)
