"""The promises of every verb: where it prints, how it explains an error, how it exits."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

from rich.console import Console

from etude.common.errors import EtudeError, Problem, UserError


class Exit(IntEnum):
    """Stable exit codes, the same for every verb."""

    DONE = 0
    NO = 1
    """It ran, and the answer is no: the run failed, a check failed."""
    USAGE = 2
    NOT_FOUND = 3
    INVALID = 4
    UNREACHABLE = 6
    CONFLICT = 8
    BUG = 70
    INTERRUPTED = 130


CODES = {
    "NotFound": Exit.NOT_FOUND,
    "Usage": Exit.USAGE,
    "Unreachable": Exit.UNREACHABLE,
    "Conflict": Exit.CONFLICT,
    "Internal": Exit.BUG,
}
"""By reason; every other problem is invalid input."""
WAYS_OUT = {
    errno.ENOSPC: "free some space, or take a folder on another disk",
    errno.EDQUOT: "free some space, or take a folder on another disk",
    errno.EACCES: "take a file or folder that you may use",
    errno.EPERM: "take a file or folder that you may use",
    errno.EROFS: "take a folder on a disk that can be written to",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
}


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
        raise SystemExit(CODES.get(error.problem.reason, Exit.INVALID)) from error
    except EtudeError as error:
        say(f"{error}  [{error.reason}]")
        raise SystemExit(Exit.NO) from error
    except OSError as error:
        say(of_system(error).text())
        raise SystemExit(Exit.NO) from error
    except KeyboardInterrupt as error:
        raise SystemExit(Exit.INTERRUPTED) from error


def of_system(error: OSError) -> Problem:
    """What the system refused, in three parts."""
    return Problem(
        "SystemError",
        what=error.strerror or str(error),
        where=str(error.filename or "this machine"),
        fix=WAYS_OUT.get(error.errno or 0, "etude doctor checks this machine"),
    )
