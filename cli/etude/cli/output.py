"""What the command line prints, and the exit codes it promises."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from rich.console import Console

from etude.common.errors import EtudeError, UserError


class Exit(IntEnum):
    """Stable exit codes, the same for every verb."""

    DONE = 0
    NO = 1
    """It ran, and the answer is no: the run failed, a check failed."""
    USAGE = 2
    NOT_FOUND = 3
    INVALID = 4
    UNREACHABLE = 6
    BUG = 70
    INTERRUPTED = 130


def console(*, to_stderr: bool = False) -> Console:
    """Data goes to stdout, everything else to stderr; NO_COLOR is honoured."""
    return Console(stderr=to_stderr, highlight=False)


def say(text: str) -> None:
    """One line for people."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def explained() -> Iterator[None]:
    """Turn our errors into three-part messages and exit codes, never into a stack trace.

    Raises:
        SystemExit: with the code that fits the error.
    """
    try:
        yield
    except UserError as error:
        say(error.problem.text())
        codes = {"NotFound": Exit.NOT_FOUND, "Usage": Exit.USAGE, "Unreachable": Exit.UNREACHABLE}
        raise SystemExit(codes.get(error.problem.reason, Exit.INVALID)) from error
    except EtudeError as error:
        say(f"{error}  [{error.reason}]")
        raise SystemExit(Exit.NO) from error
    except KeyboardInterrupt as error:
        raise SystemExit(Exit.INTERRUPTED) from error
