"""Files that a command makes beside its folder: checked before it runs, made only if still new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steadykv.errors import ConfigError


def new_file(path: Path, option: str) -> Path:
    """A file that does not exist yet in a folder that does. Raises ConfigError."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{option}: got {path}, which exists; choose a new file name")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option}: got {path}, but {path.parent} is no folder; make it, or choose another"
        )
    return path


def resumed_file(path: Path, option: str, folder: Path | None) -> Path:
    """As `new_file`, but the run in ``folder`` (None: a new one) may have made the file already.

    It then is the table in that folder, byte by byte. Raises ConfigError.
    """
    from steadykv.evaluation.results import METRICS_CSV_FILE

    if folder is None or not path.is_file():
        return new_file(path, option)
    written = folder / METRICS_CSV_FILE
    if not written.is_file() or path.read_bytes() != written.read_bytes():
        raise ConfigError(
            f"{option}: got {path}, which exists and does not hold the rows of this run; remove it"
        )
    return path


def check_distinct(places: Mapping[str, Path | None]) -> None:
    """Refuse one place for two outputs: the later would replace the earlier. Raises ConfigError.

    places: option -> file or folder, None where it was not given.
    """
    taken: dict[Path, str] = {}
    for option, path in places.items():
        if path is None:
            continue
        other = taken.setdefault(path.resolve(), option)
        if other != option:
            raise ConfigError(
                f"{option}: got {path}, which {other} names as well; expected a place of its own"
            )


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], option: str) -> None:
    """Write rows as a new CSV; one that holds just these rows already is left as it is.

    Raises ConfigError where another run has made the file meanwhile, SteadyKVError where the
    system refuses.
    """
    from steadykv.evaluation.results import csv_bytes

    write_new(path, csv_bytes(rows), option)


def write_new(path: Path, data: bytes, option: str) -> None:
    """`write_table` for any file."""
    from steadykv.evaluation.results import write_bytes_atomically

    try:
        write_bytes_atomically(path, data, new=True)
    except FileExistsError:
        if path.is_file() and path.read_bytes() == data:
            return
        raise ConfigError(
            f"{option}: got {path}, which another run has just made; choose another name, or start "
            "again"
        ) from None
