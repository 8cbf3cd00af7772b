"""The `steadykv` command: parses, runs one command, and turns every known failure into one line.

Imports next to nothing: Ctrl-C must find `main` running, not Python still importing it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from steadykv.cli.interrupts import INTERRUPTED, INTERRUPTED_EARLY, quit_on_interrupt, say


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 2 for a user's mistake, 130 for Ctrl-C.

    As the program itself (``arguments`` None), Ctrl-C ends the process at once for as long as
    nothing has been started; see :mod:`steadykv.cli.interrupts`.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments is None:
            quit_on_interrupt()
            # Read by OpenMP when torch loads: threads that spin while they wait for each other take
            # the cores from it where another program is busy too.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from steadykv.cli.app import app
        from steadykv.cli.common import expand_lists, report_failure
    except KeyboardInterrupt:
        return say(INTERRUPTED_EARLY, INTERRUPTED)
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 gets "?", not a traceback
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(
            expand_lists(typed) or ["--help"],
            standalone_mode=False,
            prog_name="steadykv",
            obj=typed,
        )
    except BaseException as error:
        known = report_failure(error, typed)
        if known is None:
            raise
        return known
    if code == INTERRUPTED:  # the parser took a KeyboardInterrupt for itself and said nothing
        return say("interrupted", INTERRUPTED)
    return int(code or 0)


if __name__ == "__main__":
    sys.exit(main())
