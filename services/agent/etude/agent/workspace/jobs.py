"""Background jobs of a workspace: interface, states and limits.

All drivers have the same limits, the agents in guests included, so that a job does not depend on
its driver.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

import grpc
from typing_extensions import override

from etude.common.errors import EtudeError

MAX_RUNNING = 8
MAX_KNOWN = 64
"""Of the jobs that have ended, the oldest is forgotten first, with its output."""
LOG_BYTES = 4 << 20
"""Output limit: a job that prints more is ended, and the excess is not shown."""
INPUT_BYTES = 4096
"""A pipe takes this much atomically."""
TERM_GRACE_S = 2.0
"""Between the two signals that end a job."""


class JobFault(StrEnum):
    """Reason for refusing a job operation; the value is for the policy."""

    NO_SUCH_JOB = "there is no such job"
    TOO_MANY = f"{MAX_RUNNING} jobs run already: end one first"
    NOT_READING = "it does not read its input"
    NO_INPUT = "its input has ended"
    UNAVAILABLE = "commands cannot run in the background here"
    TOO_LONG = "the command is too long"


class JobError(EtudeError):
    """An error of a job that the policy caused and can correct."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason: ClassVar[str] = "InvalidJob"

    def __init__(self, fault: JobFault, job: int = 0) -> None:
        super().__init__(f"job {job}: {fault.value}" if job else fault.value)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job."""

    log_bytes: int
    """Output so far, at most LOG_BYTES."""
    is_running: bool
    exit_code: int = 0
    """Of a job that has ended; 128 and the signal's number if one ended it."""
    ended_for: str = ""
    """The limit that ended it: time, memory, output or disk; empty when none did."""
    cpu_ms: int = 0


class Jobs(Protocol):
    """The background commands of one environment, numbered from 1.

    Every method raises JobError for errors that the policy can correct, and WorkspaceLostError when
    the platform failed. All jobs end with their environment.
    """

    @property
    def may_run(self) -> bool:
        """False if certainly no job runs: then only tools change the workspace."""
        ...

    async def start(self, command: str, *, timeout_s: float | None) -> int:
        """Start a shell command, which ends after the timeout if there is one."""
        ...

    async def state(self, job: int, *, wait_s: float = 0) -> JobState:
        """State once the job has ended, or after the wait."""
        ...

    async def output(self, job: int, *, offset: int, size: int) -> bytes:
        """Up to `size` bytes of both streams."""
        ...

    async def send(self, job: int, data: bytes, *, end: bool) -> None:
        """Send input atomically; with `end`, close the input after it."""
        ...

    async def kill(self, job: int) -> None:
        """Send SIGTERM and, after a grace, kill the job with all its processes."""
        ...


class NoJobs(Jobs):
    """A workspace where nothing runs in the background."""

    __slots__ = ()

    @property
    @override
    def may_run(self) -> bool:
        return False

    @override
    async def start(self, command: str, *, timeout_s: float | None) -> int:
        raise JobError(JobFault.UNAVAILABLE)

    @override
    async def state(self, job: int, *, wait_s: float = 0) -> JobState:
        raise JobError(JobFault.NO_SUCH_JOB, job)

    @override
    async def output(self, job: int, *, offset: int, size: int) -> bytes:
        raise JobError(JobFault.NO_SUCH_JOB, job)

    @override
    async def send(self, job: int, data: bytes, *, end: bool) -> None:
        raise JobError(JobFault.NO_SUCH_JOB, job)

    @override
    async def kill(self, job: int) -> None:
        raise JobError(JobFault.NO_SUCH_JOB, job)
