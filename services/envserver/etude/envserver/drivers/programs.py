"""Interactive programs in a sandbox, for all drivers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

DEFAULT_TIMEOUT_S = 3_600
MAX_TIMEOUT_S = 86_400
MAX_TERMINAL = 1_000
"""Rows or columns."""
MAX_ENVIRONMENT_BYTES = 64 << 10
"""Names and values that a client adds; with the longest command they fit one message."""


class OutputStream(IntEnum):
    """Stream of a piece of output; a terminal has the first only."""

    OUT = 1
    ERR = 2


class OutputPiece(NamedTuple):
    """A piece of output."""

    stream: OutputStream
    data: bytes


class TerminalSize(NamedTuple):
    """Size of a terminal, in characters."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to run in a workspace."""

    argv: Sequence[str]
    cwd: str = ""
    """Relative to the workspace."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's own."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    terminal: TerminalSize | None = None
    """A terminal instead of three pipes."""
    is_merged: bool = False
    """Whether both outputs are one stream, in order."""
    shares_network: bool = False
    """Whether other processes of the workspace can connect to it."""


class ProgramExit(NamedTuple):
    """Exit of a program."""

    exit_code: int
    """128 + n after signal n."""
    ended_for: str
    """Limit that ended it: time, memory or disk."""
    cpu_ms: int


class RunningProgram(Protocol):
    """One program. Every method raises SandboxError for the driver's own failures."""

    number: int
    """Unique in its driver's process."""

    def output(self) -> AsyncIterator[OutputPiece]:
        """Iterate over its output to the end; a slow reader slows the program down."""

    async def wait(self) -> ProgramExit:
        """Wait until all of it has ended. Its output is read first, or it may not end."""

    async def write(self, data: bytes) -> None:
        """Write input; what it no longer reads is dropped."""

    def close_input(self) -> None:
        """Close its input."""

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""

    def resize(self, size: TerminalSize) -> None:
        """Change its terminal's size; no effect without a terminal."""

    def kill(self) -> None:
        """Kill it and all that it started; wait() waits for that."""

    async def close(self) -> None:
        """Kill it if it runs, and release its resources; its output is not read any more."""
