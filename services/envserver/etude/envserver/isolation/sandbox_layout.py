"""Paths, users, limits and environment of a sandbox, shared by both sides of its boundary."""

import errno
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

WORKSPACE, TESTS, LOGS = "/workspace", "/tests", "/logs"
PRIVATE = "/.etude"
"""Holds every lease of the host; covered before a command starts."""
LEASES = f"{PRIVATE}/leases"
PRIVATE_PROC = f"{PRIVATE}/proc"
TOOLS = "/opt/etude"

INSIDE_UID = 1000
OUTSIDE_UID = 65_533
"""Commands' user on the machine when the host process is root: without a home or files."""

MIB = 1 << 20
MEMORY_BYTES = 1 << 30
"""Limit of one process's address space, and of the resident memory of a command's processes."""
FILE_BYTES = 64 * MIB
TEMPORARY_BYTES = 64 * MIB
"""Size of /tmp; /tests, /logs and /dev/shm get a quarter each."""
PROCESSES = 64
OPEN_FILES = 256
GUEST_PROCESSES, GUEST_OPEN_FILES, GUEST_FILE_BYTES = 512, 4096, 1024 * MIB
"""The same inside of guests, whose memory and disk are their own: compilers and servers start."""
FLOOD_BYTES = 256 * MIB
"""A command that has printed this much is ended: reading it all would starve others."""
FREE_DISK_BYTES = 128 * MIB
"""A command is ended when the workspaces' disk has less free space."""
TERM_GRACE_S = 2.0
WATCH_INTERVAL_S = 0.1
PROGRAM_INTERVAL_S = 0.5
"""The same for programs, which may run for hours: each check costs 0.5 ms."""
MAX_COMMAND_BYTES = 128 * 1024
"""Longest argument that Linux passes to a program."""
MAX_REQUEST_BYTES = 256 * 1024
"""Longest message to the server: control characters take six bytes each in it."""
MAX_COLLECTED_BYTES = 64 * 1024

ENVIRONMENT: Mapping[str, str] = {
    "CI": "1",
    "HOME": "/tmp",  # noqa: S108 - a private tmpfs
    "LANG": "C.UTF-8",
    "PAGER": "cat",
    "PATH": f"{TOOLS}/bin:/usr/local/bin:/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "TERM": "dumb",
    "USER": "agent",
}
"""Environment variables of a command; a fixed hash seed makes test runs repeatable."""


def command_environment(image: Mapping[str, str]) -> Mapping[str, str]:
    """Environment variables of a command, those that its image says first."""
    return {**ENVIRONMENT, **image}


_RUN_TESTS = re.compile(r"\s*pytest( -q)?\s*")
_RUN_FILE = re.compile(r"\s*python3? ([A-Za-z0-9_./-]*[A-Za-z0-9_]\.py)\s*")


class WarmCommand(NamedTuple):
    """A command that the warm interpreter runs without starting a program."""

    file: str | None
    """The Python file to run; None is the test runner."""


def parse_warm_command(command: str) -> WarmCommand | None:
    """Parse a command that the warm interpreter can run; None: the shell runs it."""
    if _RUN_TESTS.fullmatch(command):
        return WarmCommand(None)
    match = _RUN_FILE.fullmatch(command)
    return WarmCommand(match.group(1)) if match and not match.group(1).startswith("-") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPaths:
    """Paths on the machine from which the sandbox is built."""

    leases: str
    new_root: str
    """An empty folder: mount point of the new root."""
    python: str
    prefix: str
    """Folder of the interpreter's standard library."""
    minitest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLimits:
    """Limits of one command and all its processes."""

    memory_bytes: int = MEMORY_BYTES
    """Resident memory of the processes together."""
    address_bytes: int = MEMORY_BYTES
    """Address space of each process."""
    processes: int = PROCESSES
    """Processes and threads."""
    open_files: int = OPEN_FILES
    """Of each process."""
    file_bytes: int = FILE_BYTES
    """Of one file."""
    temporary_bytes: int = TEMPORARY_BYTES
    """Size of /tmp; /logs and /dev/shm get a quarter each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxJob:
    """One command."""

    job_id: int
    command: str
    workspace: str
    """Relative to the leases."""
    tests: str = ""
    """Relative to the leases; empty leaves /tests empty."""
    timeout_s: float
    head_bytes: int
    tail_bytes: int
    collect: str = ""
    """File to read back afterwards."""
    argv: Sequence[str] = ()
    """A program instead of the command; its streams and control come as descriptors."""
    cwd: str = ""
    """Relative to the workspace."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    is_terminal: bool = False
    """Whether the streams are a terminal's."""
    shares_network: bool = False
    """Whether other processes of the lease share its network."""
    has_egress: bool = False
    """Whether the host's egress proxy listens in its network."""
    limits: CommandLimits = field(default_factory=CommandLimits)
    logs_accesses: bool = False
    """Whether the report tells which files the command touched."""

    @property
    def lease(self) -> str:
        return self.workspace.partition("/")[0]


def decode_job(message: Mapping[str, Any]) -> SandboxJob:
    """The job in a message of the driver."""
    return SandboxJob(**{**message, "limits": CommandLimits(**message["limits"])})


class _IdRange(NamedTuple):
    """One row of a user map."""

    inside: int
    outside: int
    size: int


def _ranges() -> list[_IdRange]:
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [_IdRange(*map(int, line.split())) for line in lines]


@functools.cache
def has_other_user() -> bool:
    """Tell whether commands can have another user: this process is root, with enough user ids."""
    return os.geteuid() == 0 and any(r.inside <= OUTSIDE_UID < r.inside + r.size for r in _ranges())


def require_safe_user() -> None:
    """Refuse to run commands as the machine's root, which the kernel exempts from its limits.

    Raises:
        PermissionError: they would be root.
    """
    is_hosts_root = any(r.inside == 0 and r.outside == 0 for r in _ranges())
    if os.geteuid() == 0 and is_hosts_root and not has_other_user():
        raise PermissionError(errno.EPERM, "commands would run as the host's root: map more users")


def outside_uid() -> int:
    """User of commands on the machine, who must own a workspace."""
    return OUTSIDE_UID if has_other_user() else os.geteuid()


def outside_gid() -> int:
    """Group of commands on the machine."""
    return OUTSIDE_UID if has_other_user() else os.getegid()
