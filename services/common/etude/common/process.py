"""Start and end of a process: exit codes, early SIGTERM, stacks on SIGUSR1."""

import asyncio
import contextlib
import faulthandler
import linecache
import signal
import sys
from collections.abc import Iterator
from types import FrameType

EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: the store did not answer, and nothing else is wrong."""


def end_at_once_when_told() -> None:
    """Exit on SIGTERM, until another handler replaces this one.

    The kernel ignores it for the first process of a container that has no handler: a role that is
    terminated while it imports would start, and be killed only after its whole grace period.
    """
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@contextlib.contextmanager
def shown_on_signal() -> Iterator[None]:
    """SIGUSR1 writes all stacks to stderr; those of threads also while the event loop hangs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, _show_tasks)
    # Registered last, so that it writes first and then hands the signal on to the loop.
    faulthandler.register(signal.SIGUSR1, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        loop.remove_signal_handler(signal.SIGUSR1)


def _show_tasks() -> None:
    for task in asyncio.all_tasks():
        sys.stderr.write(f"Stack for {task!r} (most recent call last):\n")
        for frame in task.get_stack():
            code = frame.f_code
            # A frame may stand at an instruction of no line, on which Task.print_stack() fails.
            number = frame.f_lineno or code.co_firstlineno
            sys.stderr.write(f'  File "{code.co_filename}", line {number}, in {code.co_name}\n')
            source = linecache.getline(code.co_filename, number).strip()
            sys.stderr.write(f"    {source}\n" if source else "")
    sys.stderr.flush()
