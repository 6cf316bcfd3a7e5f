"""Workspace interface: the protocol, path rules, faults and values of all workspaces."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

import grpc

from etude.agent.patterns import FileMatches, GrepQuery
from etude.agent.search.codebase import Codebase
from etude.agent.workspace.jobs import Jobs
from etude.agent.workspace.notes import Notes
from etude.common.errors import EtudeError, UnavailableError

HOME = "/workspace"
"""Mount point of the workspace in the sandbox; absolute paths below it name workspace files."""
MAX_FILE_BYTES = 8 << 20
"""Largest file of file tools."""
MAX_FILES = 100_000
MAX_DEPTH = 64
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 1024


class PathFault(StrEnum):
    """Reason for refusing a path; the value is for the policy."""

    NO_SUCH_FILE = "no such file"
    IS_A_FOLDER = "is a folder"
    NOT_A_FOLDER = "a part of the path is not a folder"
    NOT_A_FILE = "is not a regular file"
    OUTSIDE = "is outside of the workspace"
    BAD_NAME = "is not a usable path"
    LINK = "is a symbolic link, which file tools do not follow"
    TOO_LARGE = f"is larger than {MAX_FILE_BYTES >> 20} MiB, the limit of file tools"
    TOO_MANY = f"holds more than {MAX_FILES} files, the limit of file tools"
    TOO_SLOW = "takes too long to search; narrow the path or the pattern"
    DENIED = "permission denied"
    NO_SPACE = "no space left"


class WorkspaceError(EtudeError):
    """An error of a path that the policy caused and can correct."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason: ClassVar[str] = "InvalidPath"

    def __init__(self, fault: PathFault, path: str) -> None:
        super().__init__(f"{path or '.'}: {fault.value}")
        self.fault = fault
        self.path = path


class WorkspaceLostError(UnavailableError):
    """The workspace itself is gone or broken: a platform fault, never the policy's."""


class FileKind(StrEnum):
    """Kind of a folder's entry."""

    FILE = "file"
    FOLDER = "folder"
    OTHER = "other"


class FileInfo(NamedTuple):
    """One name of a workspace."""

    path: str
    kind: FileKind
    size: int
    """Bytes of a file, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of one command."""

    output: bytes
    """Both streams; of a long output, the beginning and the end."""
    exit_code: int
    timed_out: bool = False
    ended_for: str = ""
    """The limit that ended it: time, memory, output or disk; empty when it ended by itself."""
    cpu_ms: int = 0
    dropped_bytes: int = 0
    """Bytes left out of the middle of output."""
    dropped_lines: int = 0


Runner = Callable[[str, float], Awaitable[ExecResult]]
"""Runs a shell command in the workspace, with a time limit in seconds."""


class Workspace(Protocol):
    """Files and shell of one environment; paths are relative, with forward slashes.

    File methods raise WorkspaceError for errors that the policy can correct, PatternError for a bad
    pattern, and WorkspaceLostError when the platform failed. Lists are sorted by the bytes of the
    path; glob and grep leave out hidden names unless a pattern asks for them.
    """

    codebase: Codebase
    notes: Notes
    jobs: Jobs

    async def read(self, path: str) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def stat(self, path: str) -> FileInfo: ...
    async def list(self, path: str) -> Sequence[FileInfo]: ...
    async def glob(self, pattern: str) -> Sequence[str]: ...
    async def grep(self, query: GrepQuery) -> Sequence[FileMatches]: ...
    async def hashes(self) -> Mapping[str, bytes]:
        """SHA-256 of each regular file that is not hidden, without those too large to be read."""
        ...

    async def delete(self, path: str) -> None: ...
    async def exec(self, command: str, *, timeout_s: float) -> ExecResult: ...


def relative_path(path: str) -> str:
    """The path inside the workspace, "" for its root; parent references are resolved by name.

    Raises:
        WorkspaceError: the path leaves the workspace or is not a possible name.
    """
    inside = path.removeprefix(HOME).lstrip("/") if (path + "/").startswith(HOME + "/") else path
    segments: list[str] = []
    for segment in inside.split("/"):
        if segment == ".." and segments:
            segments.pop()
        elif segment == ".." or inside.startswith("/"):
            raise WorkspaceError(PathFault.OUTSIDE, printable_path(path))
        elif segment not in {"", "."}:
            segments.append(segment)
    clean = "/".join(segments)
    if not _is_possible(clean, segments):
        raise WorkspaceError(PathFault.BAD_NAME, printable_path(path))
    return clean


def printable_path(path: str) -> str:
    """A path, made printable for error messages."""
    return path[:200].encode("utf-8", "replace").decode().replace("\0", "\\0")


def _is_possible(path: str, segments: Iterable[str]) -> bool:
    try:
        num_bytes = len(path.encode())
    except UnicodeEncodeError:
        return False
    fits = num_bytes <= _MAX_PATH_BYTES and path.count("/") < MAX_DEPTH
    return fits and "\0" not in path and all(len(s.encode()) <= _MAX_NAME_BYTES for s in segments)


def parents(path: str) -> Iterator[str]:
    """The folders above a path, outermost first, without the root."""
    at = path.find("/")
    while at >= 0:
        yield path[:at]
        at = path.find("/", at + 1)
