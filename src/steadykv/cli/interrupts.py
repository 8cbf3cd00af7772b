"""Ctrl-C before a run has begun.

A KeyboardInterrupt that meets an import may come out as another error, or as a printed traceback
of some callback while the import goes on. There is nothing to clean up then, so the process ends.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
INTERRUPTED_EARLY = "interrupted; nothing was finished yet"


def say(message: str, code: int) -> int:
    """Print the one line that ends a command on stderr; returns ``code``."""
    print(f"steadykv: {' '.join(message.split())}", file=sys.stderr)
    return code


def quit_on_interrupt() -> None:
    """From now on Ctrl-C prints one line and ends the process, unless somebody else handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again: there is something to keep."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit(number: int, frame: FrameType | None) -> NoReturn:
    # A progress bar has hidden the cursor and holds the current line of the terminal.
    clear = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{clear}steadykv: {INTERRUPTED_EARLY}\n".encode())
    os._exit(INTERRUPTED)
