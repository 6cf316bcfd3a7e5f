"""Background jobs in a guest: its agent runs them, and keeps their state and output."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from etude.agent.workspace import JobError, JobFault, Jobs, JobState
from etude.agent.workspace.jobs import LOG_BYTES, TERM_GRACE_S
from etude.envserver.guest import replies
from etude.envserver.guest.calls import CONTROLLERS_JOBS, GuestCaller, GuestReply, GuestRequest
from etude.envserver.guest.commands import DEFAULT_LIMITS
from etude.envserver.isolation import sandbox_layout
from etude.v1 import guest_pb2

_DEADLINE_S = 60.0
"""For operations that take no time, on a busy host."""
_END_S = 10.0
"""Longest wait for the end of a job after its second signal, on a busy host."""
_FAULTS = {
    guest_pb2.GUEST_STATUS_NOT_FOUND: JobFault.NO_SUCH_JOB,
    guest_pb2.GUEST_STATUS_BUSY: JobFault.NOT_READING,
    guest_pb2.GUEST_STATUS_CONFLICT: JobFault.NO_INPUT,
}


@dataclass(slots=True, kw_only=True)
class GuestJobs(Jobs):
    """The background commands of one sandbox."""

    channel: GuestCaller
    environment: Mapping[str, str] = field(default_factory=lambda: dict(sandbox_layout.ENVIRONMENT))
    limits: guest_pb2.GuestLimits = field(default_factory=lambda: DEFAULT_LIMITS)
    cwd: str = ""
    """Absolute folder in the guest that they start in; empty is the workspace."""
    is_controllers: bool = False
    """True for the controller's jobs; the policy's have numbers of their own."""
    has_others: Callable[[], bool] = lambda: False
    """True if jobs run that were not started here: the guest was adopted with them."""
    _running: set[int] = field(default_factory=set)
    """Jobs started here whose end was not observed."""

    @property
    @override
    def may_run(self) -> bool:
        return bool(self._running) or self.has_others()

    @override
    async def start(self, command: str, *, timeout_s: float | None) -> int:
        line = command.encode("utf-8", "surrogatepass")
        if len(line) >= sandbox_layout.MAX_COMMAND_BYTES:
            raise JobError(JobFault.TOO_LONG)
        limits = guest_pb2.GuestLimits()
        limits.CopyFrom(self.limits)
        limits.flood_bytes = LOG_BYTES
        call = guest_pb2.GuestCall(
            exec=guest_pb2.GuestExec(
                shell=line,
                env=self.environment,
                timeout_ms=0 if timeout_s is None else max(1, round(timeout_s * 1000)),
                background=True,
                has_input=True,
                limits=limits,
                is_controllers=self.is_controllers,
            ),
            cwd=self.cwd,
        )
        reply = await self.channel.call(GuestRequest(operation=call, deadline_s=_DEADLINE_S))
        if reply.result.status == guest_pb2.GUEST_STATUS_BUSY:
            raise JobError(JobFault.TOO_MANY)
        number = replies.check_reply(reply, "").result.exec.job
        self._running.add(number)
        return number

    @override
    async def state(self, job: int, *, wait_s: float = 0) -> JobState:
        operation = guest_pb2.GUEST_JOB_OPERATION_STATUS
        if wait_s > 0:
            operation = guest_pb2.GUEST_JOB_OPERATION_AWAIT
        asked = guest_pb2.GuestJob(job=job, operation=operation, wait_ms=round(wait_s * 1000))
        return self._state(await self._ask(asked, wait_s=wait_s))

    @override
    async def output(self, job: int, *, offset: int, size: int) -> bytes:
        if size <= 0:
            return b""
        asked = guest_pb2.GuestJob(
            job=job, operation=guest_pb2.GUEST_JOB_OPERATION_READ, offset=offset, limit=size
        )
        return (await self._ask(asked)).data.get(1, b"")[:size]

    @override
    async def send(self, job: int, data: bytes, *, end: bool) -> None:
        await self._ask(
            guest_pb2.GuestJob(
                job=job,
                operation=guest_pb2.GUEST_JOB_OPERATION_WRITE,
                input=data,
                end_input=end,
            )
        )

    @override
    async def kill(self, job: int) -> None:
        asked = guest_pb2.GuestJob(job=job, operation=guest_pb2.GUEST_JOB_OPERATION_KILL)
        self._state(await self._ask(asked, wait_s=TERM_GRACE_S + _END_S))

    async def _ask(self, asked: guest_pb2.GuestJob, *, wait_s: float = 0) -> GuestReply:
        if self.is_controllers is not (asked.job > CONTROLLERS_JOBS):
            raise JobError(JobFault.NO_SUCH_JOB, asked.job)
        call = guest_pb2.GuestCall(job=asked)
        request = GuestRequest(operation=call, deadline_s=_DEADLINE_S + wait_s)
        reply = await self.channel.call(request)
        fault = _FAULTS.get(reply.result.status)
        if fault is not None:
            raise JobError(fault, asked.job)
        return replies.check_reply(reply, "")

    def _state(self, reply: GuestReply) -> JobState:
        found = reply.result.exec
        if not found.is_running:
            self._running.discard(found.job)
        return JobState(
            log_bytes=min(found.log_bytes, LOG_BYTES),
            is_running=found.is_running,
            exit_code=128 + found.signal if found.signal else found.exit_code,
            ended_for=found.ended_for,
            cpu_ms=0 if found.is_running else reply.result.usage.cpu_us // 1000,
        )
