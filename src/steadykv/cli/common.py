"""What every command shares: option values, result folders, progress, and one line per failure."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from steadykv.cli.interrupts import INTERRUPTED, say
from steadykv.errors import BackendUnavailable, ConfigError, SteadyKVError

if TYPE_CHECKING:
    import torch

LIST_OPTIONS = ("--methods", "--works")
USER_ERROR = 2

Advance = Callable[[int, int, str], None]
"""(steps done, steps in all, what is running)."""


class Interrupted(Exception):
    """Ctrl-C, with the line that says what was kept."""


def expand_lists(arguments: Sequence[str]) -> list[str]:
    """``--methods a b c`` (and ``a,b,c``) as the repeated options that the parser understands."""
    expanded: list[str] = []
    option: str | None = None
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        name, equals, value = argument.partition("=")
        if argument in LIST_OPTIONS:
            option = argument
            if following is None:  # reaches the parser as it is, which then asks for a value
                expanded.append(argument)
            elif following.startswith("-"):  # named, but given nothing: refused as an empty value
                expanded += [argument, ""]
        elif equals and name in LIST_OPTIONS:
            option = name
            expanded += _repeated(name, value)
        elif argument.startswith("-"):
            option = None
            expanded.append(argument)
        elif option is not None:
            expanded += _repeated(option, argument)
        else:
            expanded.append(argument)
    return expanded


def _repeated(option: str, values: str) -> list[str]:
    """The option before each value; an empty list stays an empty value, which is then refused."""
    given = [value for value in values.split(",") if value] or [""]
    return [part for value in given for part in (option, value)]


def checked_methods(
    methods: Sequence[str],
    policy: Mapping[str, int],
    centroids: int,
    paired: str | None = None,
    *,
    keys: str | None = None,
    values: str | None = None,
    calibrated: bool = False,
) -> list[str]:
    """The methods with "bf16", the original of every comparison, in front. Raises ConfigError.

    ``keys`` and ``values``, given together, add the method KEYS:VALUES. Everything that
    can be wrong with them is found here, before a model is loaded. ``calibrated``: whether there is
    a calibration for methods that need one.
    """
    from steadykv.config import CachePolicy
    from steadykv.evaluation.protocol import FLOORS, Protocol

    if (keys is None) != (values is None):
        given, missing = ("--keys", "--values") if values is None else ("--values", "--keys")
        raise ConfigError(
            f"{given}: got {keys or values!r} without {missing}, expected both; add {missing} NAME"
        )
    for name in FLOORS:
        if name in methods:
            raise ConfigError(
                f"--methods: got {name!r}, expected caches; the noise floor has an option of its "
                "own, --floor of steadykv compare: leave it away here"
            )
    names = ["bf16", *(name for name in methods if name != "bf16")]
    if keys is not None and f"{keys}:{values}" not in names:
        names.append(f"{keys}:{values}")
    Protocol(
        methods=tuple(names),
        centroids=centroids,
        policy=CachePolicy(**policy),
        paired_against=paired,
        calibrated=calibrated,
        shift=None,
    )
    return names


def checked_device(name: str) -> torch.device:
    """The device of that name. Raises ConfigError or BackendUnavailable."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device: got {name!r}, expected cpu, cuda or cuda:N; choose one")
    if device.type == "cpu" and device.index:  # PyTorch takes any, and there is one
        raise ConfigError(f"--device: got {name!r}, but there is one CPU; use --device cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise BackendUnavailable(
                f"--device: got {name!r}, but this PyTorch ({torch.__version__}) sees {count} CUDA "
                "devices; use --device cpu, or install a CUDA build of torch"
            )
    return device


def new_folder(out: Path | None, kind: str) -> Path:
    """Path of a result folder that does not exist yet; nothing is made.

    ``out`` None gives results/KIND-YYYYMMDD-HHMMSS. Raises ConfigError when ``out`` exists.
    """
    if out is not None:
        if out.exists() or out.is_symlink():
            raise ConfigError(
                f"--out: got {out}, which exists; expected a new folder: choose another name, or "
                "leave --out away for a dated one"
            )
        return out
    stem = Path("results") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"
    candidates = [stem, *(stem.with_name(f"{stem.name}-{count}") for count in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def claim(folder: Path) -> None:
    """Make the result folder, which nobody else may have made meanwhile.

    Raises ConfigError if somebody has, SteadyKVError if it cannot be made.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"--out: got {folder}, which another run has just made; choose another name, or start "
            "again"
        ) from None
    except OSError as error:
        raise SteadyKVError(
            f"could not make the folder {folder}: {error.strerror or error}; choose another"
        ) from error


@contextmanager
def claimed(folder: Path | None, *, exists: bool = False) -> Iterator[None]:
    """Run a command inside its new result folder (None: it needs none).

    ``exists``: the folder is that of an interrupted run, which goes on.

    Afterwards an empty folder is removed; Ctrl-C becomes Interrupted, and the line of any failure
    says what was kept.
    """
    had_parent = folder is not None and folder.parent.exists()
    if folder is not None and not exists:
        claim(folder)
    try:
        yield
    except KeyboardInterrupt:
        kept = "nothing was finished yet" if folder is None else describe_kept(folder)
        raise Interrupted(f"interrupted; {kept}") from None
    except Exception as error:
        if folder is not None and kept_files(folder):
            error.add_note(describe_kept(folder))
        raise
    finally:
        if folder is not None:
            remove_if_empty(folder)
            if not had_parent:
                remove_if_empty(folder.parent)


def remove_if_empty(folder: Path) -> None:
    """Leave no empty result folder behind."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def describe_kept(folder: Path) -> str:
    """What an unfinished run leaves, for the line that ends it."""
    files = kept_files(folder)
    return f"kept in {folder}: {', '.join(files)}" if files else "nothing was finished yet"


def kept_files(folder: Path) -> list[str]:
    """Names of the files in a result folder, none when there is no folder."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Progress on stderr: a bar on a terminal, one line per new step elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_per_step(console)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def advance(done: int, total: int, label: str) -> None:
            progress.update(task, completed=done, total=total, description=label)

        yield advance


def _line_per_step(console: Console) -> Advance:
    last = ""

    def advance(done: int, total: int, label: str) -> None:
        nonlocal last
        if label != last:
            last = label
            console.print(f"{label} ({done}/{total})", highlight=False, soft_wrap=True)

    return advance


def command_text(arguments: Sequence[str]) -> str:
    """The command as it can be typed again."""
    import shlex

    return shlex.join(["steadykv", *arguments])


def one_line(text: str) -> str:
    """Any message as one line."""
    return " ".join(text.split())


def _with_value(message: str, typed: Sequence[str]) -> str:
    """The parser's message about a refused value, with the value, which it leaves out."""
    found = re.match(r"Invalid value for '(--[\w-]+)': (?:Value error, )?(.*)", message)
    if found is None:
        return message
    option, reason = found[1], found[2].rstrip(".")
    values = [value for name, value in pairwise(typed) if name == option]
    values += [text.partition("=")[2] for text in typed if text.startswith(f"{option}=")]
    got = f"got {values[-1]!r}; " if values else ""
    return f"{option}: {got}{reason[:1].lower()}{reason[1:]}"


def report_failure(error: BaseException, typed: Sequence[str]) -> int | None:
    """Print what a known failure means and return its exit code; None for a bug.

    ``typed`` are the arguments, from which a refused value is quoted. Notes of the error, such as
    what a run had kept before it, end the line.
    """
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, Interrupted | KeyboardInterrupt | typer.Abort):
        return say(str(error) or "interrupted", INTERRUPTED)
    if isinstance(error, BrokenPipeError):  # the reader of our output went away: nothing to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USER_ERROR
    if isinstance(error, SteadyKVError):
        return say(f"{error}{notes}", USER_ERROR)
    if isinstance(error, OSError):
        what = f"{error.filename}: " if error.filename else ""
        return say(f"{what}{error.strerror or error}{notes}", USER_ERROR)
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        options = {
            "compare": "a smaller --batch or fewer --frames",
            "capture": "fewer --episodes, --frames, --layers or --heads",
            "bench": "fewer --heads, --tokens or --queries",
            "calibrate": "a capture of fewer --episodes, --frames, --spans or --heads",
            "measure": "--no-lpips, or smaller videos",
            "tensors": "fewer --methods, or a file with shorter spans or fewer heads",
        }
        smaller = next((options[word] for word in typed if word in options), "fewer --frames")
        return say(
            f"out of memory ({one_line(str(error))[:160]}); try {smaller}{notes}", USER_ERROR
        )
    show: Any = getattr(error, "format_message", None)  # the parser's own errors
    if show is not None:
        return say(f"{_with_value(show(), typed)} (--help lists the options)", USER_ERROR)
    return None
