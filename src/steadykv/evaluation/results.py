"""Result files: their schema, and how they get under their final name whole or not at all.

docs/results-schema.md describes every field. ``metrics.json`` is a list of one object per method.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from steadykv.errors import ConfigError, PayloadError, SteadyKVError

SCHEMA_VERSION = 1

METRICS_FILE = "metrics.json"
METRICS_CSV_FILE = "metrics.csv"
ROLLOUTS_FILE = "rollouts.json"
SHIFT_FILE = "token_shift.json"

Row = dict[str, Any]

_NUMBER = (int, float)
REQUIRED_FIELDS: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "method": (str,),
    "keys": (str,),
    "values": (str,),
    "bits_per_element": _NUMBER,
    "compression": _NUMBER,
    "compression_mean": _NUMBER,
    "psnr": _NUMBER,
    "psnr_windows": (dict,),
    "psnr_by_frame": (list,),
    "ssim": _NUMBER,
    "flicker_error": _NUMBER,
    "top1_shift": (*_NUMBER, type(None)),
    "top5_shift": (*_NUMBER, type(None)),
    "resident_bytes": (int,),
    "peak_bytes": (int,),
    "seconds": _NUMBER,
    "batch_rollouts": (int,),
    "n_rollouts": (int,),
    "planned_rollouts": (int,),
    "n_episodes": (int,),
    "n_seeds": (int,),
    "identical_rollouts": (int,),
    "first_changed_frame": (int, type(None)),
    "intervals": (dict, type(None)),
    "paired": (dict, type(None)),
    "configuration": (dict,),
    "environment": (dict,),
}
"""Fields of a row and the JSON types they may have. Readers ignore fields they do not know."""


def write_bytes_atomically(path: str | Path, data: bytes, *, new: bool = False) -> Path:
    """Write ``data`` to ``path`` so that the name only ever holds a complete file.

    The bytes go to a temporary file of the same folder, are flushed to the disk and renamed. On any
    failure, Ctrl-C included, the temporary file is removed and what stood under the name stays.
    Raises SteadyKVError when the system refuses (disk full, no permission, not a folder) and, with
    ``new``, FileExistsError where the name is taken, however late somebody took it.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; results get the permissions any other new file would.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        if not new or not _linked(temporary, target):
            os.replace(temporary, target)
            temporary = None
    except FileExistsError:
        raise
    except OSError as error:
        raise SteadyKVError(
            f"could not write {target} ({len(data):,} bytes): {error.strerror or error}; "
            "free space or choose another folder"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    return target


def _linked(source: str, target: Path) -> bool:
    """Give ``source`` the new name ``target`` as well, which is made whole and only if it is new.

    False, with the name held by an empty file, on a file system without hard links. Raises
    FileExistsError.
    """
    try:
        os.link(source, target)
        return True
    except FileExistsError:
        raise
    except OSError:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        return False


def to_json(value: Any) -> str:
    """``value`` as strict JSON text. Raises ConfigError for what JSON cannot hold (NaN, inf)."""
    try:
        return json.dumps(value, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a result cannot be written: {error}; expected finite numbers, text, lists and "
            "dictionaries: give infinite PSNR its ceiling and undefined numbers null"
        ) from error


def as_read(value: Any) -> Any:
    """``value`` as a reader of its file gets it: tuples as lists, keys as text."""
    return json.loads(to_json(value))


def write_json(path: str | Path, value: Any) -> Path:
    """Write ``value`` as strict JSON, atomically; raises as to_json and write_bytes_atomically."""
    return write_bytes_atomically(path, to_json(value).encode())


def check_rows(rows: Any, source: str = "rows") -> list[Row]:
    """``rows`` if they follow the schema; raises PayloadError naming row, field and got type."""
    if not isinstance(rows, list):
        raise PayloadError(f"{source} holds a {type(rows).__name__}; expected a list of methods")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise PayloadError(f"{source}[{index}] is a {type(row).__name__}; expected an object")
        for name, types in REQUIRED_FIELDS.items():
            where = f"{source}[{index}] ({row.get('method', 'unnamed')})"
            if name not in row:
                raise PayloadError(f"{where} lacks {name}; expected a file of this version")
            value = row[name]
            # bool is an int to Python, but no number of this schema is a truth value.
            if not isinstance(value, types) or isinstance(value, bool):
                names = " or ".join("null" if t is type(None) else t.__name__ for t in types)
                raise PayloadError(f"{where} has {name} = {value!r}; expected {names}")
        if row["version"] != SCHEMA_VERSION:
            raise PayloadError(
                f"{source}[{index}] has version {row['version']}; expected {SCHEMA_VERSION}: "
                "read it with the release that wrote it"
            )
    return rows


def write_metrics(folder: str | Path, rows: Sequence[Row]) -> Path:
    """Write rows as ``metrics.json`` and ``metrics.csv`` of an existing folder, each atomically."""
    checked = check_rows(list(rows), METRICS_FILE)
    path = write_json(Path(folder) / METRICS_FILE, checked)
    write_csv(Path(folder) / METRICS_CSV_FILE, checked)
    return path


def read_metrics(path: str | Path) -> list[Row]:
    """Rows of a ``metrics.json`` (or of the folder that holds one). Raises PayloadError."""
    source = Path(path)
    if source.is_dir():
        source = source / METRICS_FILE
    return check_rows(read_json(source), str(source))


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises PayloadError for what cannot be read or is none.

    Strict JSON: a number that is not finite is refused with its place in the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PayloadError(
            f"could not read {path}: {error.strerror}; expected what compare wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{path} is no JSON: {error}; expected what compare wrote") from error
    wrong = _not_finite(found)
    if wrong is not None:
        raise PayloadError(f"{path}: {wrong}; expected a finite number, as strict JSON has")
    return found


def _not_finite(value: Any, name: str = "") -> str | None:
    """The first number that is not finite, as "[1] (qvg).psnr is nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name or 'the file'} is {value}"
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        method = value.get("method")
        label = f" ({method})" if isinstance(method, str) and name.endswith("]") else ""
        dot = "." if name else ""
        parts = ((f"{name}{label}{dot}{key}", part) for key, part in value.items())
    elif isinstance(value, list):
        parts = ((f"{name}[{index}]", part) for index, part in enumerate(value))
    return next((found for n, part in parts if (found := _not_finite(part, n))), None)


def flatten(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as dotted names; pairs of bounds as ``.low`` and ``.high``; no curves.

    Lists of numbers longer than a pair (``psnr_by_frame``) are left out: a table row is for
    comparing methods, the curves stay in ``metrics.json``.
    """
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            flat[prefix + name] = value
        elif _is_bounds(value):
            flat[f"{prefix}{name}.low"], flat[f"{prefix}{name}.high"] = value
        elif all(isinstance(entry, str | int) for entry in value):
            flat[prefix + name] = " ".join(map(str, value))
    return flat


def _is_bounds(value: list[Any]) -> bool:
    return len(value) == 2 and all(isinstance(bound, float) for bound in value)


def write_csv(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as ``csv_bytes`` makes them, atomically."""
    return write_bytes_atomically(path, csv_bytes(rows))


def csv_bytes(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Rows as CSV with one column per (dotted) field of any of them.

    Floats are written with Python's shortest exact form; null is an empty cell.
    """
    flat = [flatten(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue().encode()
