"""Background jobs as the reference agent does them."""

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.support.reference_guest.calls import Call, RefusedError
from tests.support.reference_guest.processes import (
    arguments,
    ended,
    exit_of,
    kill,
    start,
)

from etude.agent.workspace.jobs import INPUT_BYTES, MAX_KNOWN, MAX_RUNNING, TERM_GRACE_S
from etude.envserver.guest.calls import CONTROLLERS_JOBS
from etude.v1 import guest_pb2

_DEFAULT_JOB_READ, _MAX_JOB_READ = 64 << 10, 1 << 20
_WATCH_S = 0.1


class _HasJobs(Protocol):
    @property
    def jobs(self) -> "Jobs": ...


@dataclass(slots=True)
class _Job:
    number: int
    call_id: bytes
    log: Path
    process: Process
    feed: int
    """Our end of its input; below 0 once that has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    ended_for: str = ""
    watch: asyncio.Task[None] | None = None

    @property
    def is_controllers(self) -> bool:
        """Whether the policy has no part in it."""
        return self.number > CONTROLLERS_JOBS

    def write(self, data: bytes, *, is_last: bool) -> None:
        """Give it all of the input.

        Raises:
            RefusedError: it does not take it.
        """
        if len(data) > INPUT_BYTES:
            raise RefusedError(guest_pb2.GUEST_STATUS_TOO_LARGE, "too much input at once")
        if self.feed < 0:
            raise RefusedError(guest_pb2.GUEST_STATUS_CONFLICT, "its input has ended")
        try:
            os.write(self.feed, data)
        except BlockingIOError as error:
            raise RefusedError(guest_pb2.GUEST_STATUS_BUSY, str(error)) from error
        except BrokenPipeError as error:
            raise RefusedError(guest_pb2.GUEST_STATUS_CONFLICT, str(error)) from error
        if is_last:
            self.end_input()

    def end_input(self) -> None:
        """Let it find the end of its input."""
        if self.feed >= 0:
            os.close(self.feed)
            self.feed = -1

    def broken(self, folder: str, limits: guest_pb2.GuestLimits) -> str:
        """The limit that it exceeds, if it does."""
        if limits.flood_bytes and self.log.stat().st_size > limits.flood_bytes:
            return "output"
        found = os.statvfs(folder)
        return "disk" if found.f_bavail * found.f_frsize < limits.min_free_bytes else ""


@dataclass(slots=True)
class Jobs:
    """Commands that nobody waits for; their output is in files.

    They are in two tables, the policy's and the controller's: neither counts for the other.
    """

    folder: Path
    on_end: Callable[[guest_pb2.GuestJobExit], None]
    _all: dict[int, _Job] = field(default_factory=dict)
    _last: dict[bool, int] = field(default_factory=lambda: {False: 0, True: CONTROLLERS_JOBS})
    """By whether it is the controller's."""

    def open(self) -> list[guest_pb2.GuestOpen]:
        """Those that run."""
        running = [job for job in self._all.values() if not job.ended.is_set()]
        return [
            guest_pb2.GuestOpen(call_id=job.call_id, background=True, job=job.number)
            for job in running
        ]

    def kill_all(self) -> None:
        """End those that run."""
        for job in self._all.values():
            if not job.ended.is_set():
                kill(job.process, signal.SIGKILL)

    async def start(self, call: Call) -> int:
        """Start the call's command.

        Raises:
            RefusedError: too many run already.
        """
        asked = call.request.exec
        table = [job for job in self._all.values() if job.is_controllers is asked.is_controllers]
        if sum(not job.ended.is_set() for job in table) >= MAX_RUNNING:
            raise RefusedError(guest_pb2.GUEST_STATUS_BUSY, "too many background jobs")
        self._forget(table)
        self._last[asked.is_controllers] += 1
        number = self._last[asked.is_controllers]
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / f"job-{number}.log"
        stdin, feed = _pipe() if asked.has_input else (DEVNULL, -1)
        try:
            with path.open("xb") as log:
                argv = arguments(asked)
                process = await start(call, argv, asked.env, stdin=stdin, stdout=log, stderr=log)
        except BaseException:
            if feed >= 0:
                os.close(feed)
            raise
        finally:
            if stdin >= 0:
                os.close(stdin)
        job = self._all[number] = _Job(number, call.request.id, path, process, feed)
        job.watch = asyncio.create_task(self._watch(job, call.folder, asked), name=path.name)
        return number

    def _forget(self, table: Sequence[_Job]) -> None:
        if len(table) >= MAX_KNOWN:
            oldest = next(job for job in table if job.ended.is_set())
            oldest.log.unlink()
            del self._all[oldest.number]

    def find(self, number: int) -> _Job:
        """The job with this number.

        Raises:
            RefusedError: there is none.
        """
        if number not in self._all:
            raise RefusedError(guest_pb2.GUEST_STATUS_NOT_FOUND, "no such job")
        return self._all[number]

    async def _watch(self, job: _Job, folder: str, asked: guest_pb2.GuestExec) -> None:
        loop = asyncio.get_running_loop()
        over_s = loop.time() + asked.timeout_ms / 1000 if asked.timeout_ms else float("inf")
        exiting = asyncio.create_task(exit_of(job.process), name="exit of a job")
        grace_s = TERM_GRACE_S
        while not exiting.done() and not job.killed.is_set():
            await asyncio.wait([exiting], timeout=_WATCH_S)
            if loop.time() >= over_s:
                job.ended_for = "time"
                break
            job.ended_for = job.broken(folder, asked.limits)
            if job.ended_for:
                grace_s = 0
                break
        if not exiting.done():
            kill(job.process, signal.SIGTERM)
            await asyncio.wait([exiting], timeout=grace_s)
            kill(job.process, signal.SIGKILL)
        job.status = await exiting
        if not job.ended_for and job.broken(folder, asked.limits) == "output":
            job.ended_for = "output"  # the limit on the size of a file came before ours
        job.end_input()
        job.ended.set()
        done = ended(job.status)
        self.on_end(
            guest_pb2.GuestJobExit(job=job.number, exit_code=done.exit_code, signal=done.signal)
        )


def _pipe() -> tuple[int, int]:
    """The job's end, and ours, which takes all of a small write or nothing."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    return theirs, ours


async def exec_in_background(call: Call, agent: _HasJobs) -> guest_pb2.GuestResult:
    """Start the call's command and answer with its number."""
    number = await agent.jobs.start(call)
    return guest_pb2.GuestResult(exec=guest_pb2.GuestExecResult(job=number, is_running=True))


async def job(call: Call, agent: _HasJobs) -> guest_pb2.GuestResult:
    """Do what is asked about a job.

    Raises:
        RefusedError: there is no such job, or it cannot do that.
    """
    asked = call.request.job
    found = agent.jobs.find(asked.job)
    match asked.operation:
        case guest_pb2.GUEST_JOB_OPERATION_STATUS:
            pass
        case guest_pb2.GUEST_JOB_OPERATION_READ:
            limit = min(asked.limit, _MAX_JOB_READ) or _DEFAULT_JOB_READ
            with found.log.open("rb") as log:
                log.seek(asked.offset)
                piece = log.read(limit)
            await call.data(1, piece)
        case guest_pb2.GUEST_JOB_OPERATION_KILL | guest_pb2.GUEST_JOB_OPERATION_AWAIT:
            if asked.operation == guest_pb2.GUEST_JOB_OPERATION_KILL:
                found.killed.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(found.ended.wait(), asked.wait_ms / 1000 or None)
        case guest_pb2.GUEST_JOB_OPERATION_WRITE:
            found.write(asked.input, is_last=asked.end_input)
        case _:
            raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, "no such operation on a job")
    done = ended(found.status)
    done.job, done.is_running = found.number, not found.ended.is_set()
    if not done.is_running:
        done.ended_for, done.timed_out = found.ended_for, found.ended_for == "time"
    done.log_bytes = found.log.stat().st_size
    return guest_pb2.GuestResult(exec=done)
