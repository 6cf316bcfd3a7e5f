"""Exit codes and error output of the programs behind `etude tasks` and `etude images`."""

import sys
from pathlib import Path

from etude.common.errors import Problem, UserError

NO = 1
INVALID = 4
CODES = {"Usage": 2, "NotFound": 3, "Conflict": 8}
"""By reason; every other problem is invalid input."""


def report_error(error: UserError | OSError) -> int:
    """Print an error in three parts; returns its exit code."""
    if isinstance(error, UserError):
        sys.stderr.write(f"{error}\n")
        return CODES.get(error.problem.reason, INVALID)
    problem = Problem(
        "SystemError",
        what=error.strerror or str(error),
        where=str(error.filename or "this machine"),
        fix="name a new folder where you may write, on a disk with free space",
    )
    sys.stderr.write(f"{problem.text()}\n")
    return NO


def option_error(option: str, what: str, fix: str) -> UserError:
    """The error of an option with an invalid value."""
    return UserError(Problem("Usage", what=what, where=option, fix=fix))


def require_folder(folder: Path) -> Path:
    """Check that a folder exists; returns it.

    Raises:
        UserError: it does not, or is not a folder.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(Problem("NotFound", what=what, where=str(folder), fix="check the path"))
    return folder
