"""Hints: suggested fixes for errors that carry none."""

import errno

from etude.common.errors import EtudeError, Problem, StoreError

_OF_SYSTEM = {
    errno.ENOSPC: "free some space, or take a folder on another disk",
    errno.EDQUOT: "free some space, or take a folder on another disk",
    errno.EFBIG: "take a folder on another disk",
    errno.EACCES: "take a file or folder that you may use",
    errno.EPERM: "take a file or folder that you may use",
    errno.EROFS: "take a folder on a disk that can be written to",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENOENT: "name a folder that is there",
    errno.EEXIST: "name a folder: a file has this name",
    errno.ENOTDIR: "name a folder: a file has this name, or one on the way to it",
    errno.EISDIR: "name a file: a folder has this name",
    errno.ENAMETOOLONG: "take a shorter name",
}
_OTHER_VERSION = "take another version: etude weights ls shows which of them count"
_BY_REASON = {
    "Corrupt": "restore what is named from a copy of the store;"
    " etude weights verify shows which versions are whole",
    "Fenced": _OTHER_VERSION,
    "NotFound": "check the name; of versions, etude weights ls shows what there is",
    "Quarantined": _OTHER_VERSION,
}


def system_problem(error: OSError) -> Problem:
    """The problem of an error of the operating system."""
    unknown = "check the path" if error.filename else "etude doctor checks this machine"
    return Problem(
        "SystemError",
        what=error.strerror or str(error),
        where=str(error.filename or "this machine"),
        fix=_OF_SYSTEM.get(error.errno or 0, unknown),
    )


def format_error(error: EtudeError) -> str:
    """The message of an Etude error, with a suggested fix."""
    return f"{error}\n  fix: {_fix(error)}  [{error.reason}]"


def _fix(error: EtudeError) -> str:
    if isinstance(error, StoreError):
        from etude.common.blobs.conformance import suggested_fix  # noqa: PLC0415 - loads the stores' clients

        return suggested_fix(error, str(error))
    again = "repeat the command; if it fails again, report it with this message"
    return _BY_REASON.get(error.reason, again)
