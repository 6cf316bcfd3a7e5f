"""What a node asks of a driver, whatever its wall is made of."""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from etude.common.errors import Problem, UnavailableError, UserError

HEAD_BYTES, TAIL_BYTES = 16 * 1024, 48 * 1024
"""What is kept of a tool call's output: twice of what the policy is shown (30 KiB), so that the
place where something is missing is never among it."""
GRADE_OUTPUT_BYTES = 64 * 1024


class Strength(StrEnum):
    """How strong the wall is, as leases state it."""

    WEAK = "Weak"
    """Namespaces of the host's kernel: trusted templates, one tenant."""
    MODERATE = "Moderate"
    STRONG = "Strong"


class Owner(NamedTuple):
    """Who a workspace's files belong to on the host."""

    uid: int
    gid: int


def current_owner() -> Owner:
    """The user and group of this process."""
    return Owner(os.geteuid(), os.getegid())


class SandboxError(UnavailableError):
    """The sandbox failed, not the policy: retry the rollout, never score it zero."""

    reason = "SandboxFailed"


class DriverUnavailableError(UserError):
    """This machine cannot run the driver, or the driver may not run this pool."""

    def __init__(self, what: str, *, where: str, fix: str) -> None:
        super().__init__(Problem(reason="DriverUnavailable", what=what, where=where, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One shell command in one workspace."""

    command: str
    workspace: Path
    """A folder below the driver's leases."""
    tests: Path | None = None
    """A folder below the driver's leases, shown as /tests."""
    timeout_s: float
    head_bytes: int = HEAD_BYTES
    tail_bytes: int = TAIL_BYTES
    collect: str = ""
    """A file to read back afterwards: regular, small, reached without links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the command did."""

    output: bytes
    """Both streams: beginning and end."""
    exit_code: int
    timed_out: bool = False
    ended_for: str = ""
    """The limit that ended it: time, memory, output or disk."""
    dropped_bytes: int = 0
    dropped_lines: int = 0
    cpu_ms: int = 0
    wall_ms: int = 0
    collected: bytes | None = None


class Driver(Protocol):
    """Runs commands in workspaces; every method raises SandboxError for its own failures."""

    name: str
    strength: Strength
    leases: Path
    """All workspaces are below this folder."""

    def owner(self) -> Owner: ...
    async def start(self) -> None: ...
    async def run(self, command: Command) -> Outcome: ...
    async def stop(self) -> None: ...
