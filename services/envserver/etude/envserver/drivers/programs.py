"""Programs that are talked to while they run, whatever driver runs them."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

DEFAULT_TIMEOUT_S = 3_600
MAX_TIMEOUT_S = 86_400
MAX_TERMINAL = 1_000
"""Rows or columns."""
MAX_ENVIRONMENT_BYTES = 64 << 10
"""Names and values that a client adds; with the longest command they still fit one message."""


class Stream(IntEnum):
    """Where a piece of output came from; a terminal has the first only."""

    OUT = 1
    ERR = 2


class Piece(NamedTuple):
    """Some output."""

    stream: Stream
    data: bytes


class Size(NamedTuple):
    """Of a terminal, in characters."""

    rows: int
    columns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run in a workspace."""

    argv: Sequence[str]
    """The program, and its arguments."""
    cwd: str = ""
    """Relative to the workspace."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's own."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    terminal: Size | None = None
    """A terminal in place of three pipes."""
    is_merged: bool = False
    """Both outputs are one, so that their order is kept."""
    shares_network: bool = False
    """While it runs, what starts in the workspace can talk to it."""


class Ending(NamedTuple):
    """How a program ended."""

    exit_code: int
    """128 + n after signal n."""
    ended_for: str
    """The limit that ended it: time, memory or disk."""
    cpu_ms: int


class RunningProgram(Protocol):
    """One program. Every method raises SandboxError for the driver's own failures."""

    number: int
    """Unique in its driver's process."""

    def output(self) -> AsyncIterator[Piece]:
        """What it writes, to the end; a reader that is slow slows the program down."""
        ...

    async def ending(self) -> Ending:
        """Wait until nothing of it is left. Its output is read first, else it may not end."""
        ...

    async def write(self, data: bytes) -> None:
        """Give it input; what it does not read any more is dropped."""
        ...

    def close_input(self) -> None:
        """It has all input."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it started in the same group."""
        ...

    def resize(self, size: Size) -> None:
        """Change its terminal's size; without one nothing happens."""
        ...

    def kill(self) -> None:
        """End it and all that it started; ending() says when that is done."""
        ...

    async def close(self) -> None:
        """End it, if it has not ended, and let everything of it go; nobody reads its output."""
        ...
