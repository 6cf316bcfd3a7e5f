"""Start and end of a process: exit codes, early SIGTERM, stacks on SIGUSR1."""

import signal
import sys
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
