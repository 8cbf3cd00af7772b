"""Reading finished results, as they were written or gzipped."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steadykv.errors import SteadyKVError


def in_one_line(main: Callable[[], None]) -> None:
    """Run a program; what it refuses ends it with one line."""
    try:
        main()
    except SteadyKVError as error:
        raise SystemExit(str(error)) from None


def text_of(path: Path) -> str:
    """The text of a file. A name that ends in .gz is unpacked; ends the program if it cannot."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise SystemExit(f"could not read {path}: {error}") from error


def csv_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, plain or gzipped."""
    return list(csv.DictReader(io.StringIO(text_of(path))))


def json_of(path: Path) -> Any:
    """What a JSON file holds, plain or gzipped."""
    try:
        return json.loads(text_of(path))
    except ValueError as error:
        raise SystemExit(f"{path} is no JSON: {error}") from error


def either(folder: Path, name: str) -> Path | None:
    """The file of that name in a folder, plain or gzipped; None where neither is."""
    found = (path for path in (folder / name, folder / f"{name}.gz") if path.is_file())
    return next(found, None)
