"""Background jobs of one lease, run as programs of the host.

Their output is in a file next to the workspace, their exit in another, so both survive this
process; the jobs do not.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from etude.agent.workspace import JobError, JobFault, Jobs, JobState
from etude.agent.workspace.jobs import LOG_BYTES, MAX_KNOWN, MAX_RUNNING, TERM_GRACE_S
from etude.common import atomic
from etude.common.errors import EtudeError, InvalidFieldError
from etude.envserver.drivers.base import SandboxError
from etude.envserver.drivers.piped_program import PipedProgram
from etude.envserver.drivers.programs import MAX_TIMEOUT_S, Program

FOLDER = "jobs"
"""Name of their folder in a lease's folder."""
_KILLED = 128 + signal.SIGKILL
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC

Launch = Callable[[Program], Awaitable[PipedProgram]]


@dataclass(slots=True)
class _Job:
    number: int
    log_bytes: int = 0
    end: JobState | None = None
    """Set once all of it has ended."""
    lost: str = ""
    """Reason why its exit is unknown: a platform fault."""
    program: PipedProgram | None = None
    task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.program is not None

    def state(self) -> JobState:
        """Report its state.

        Raises:
            SandboxError: its exit is unknown.
        """
        if self.lost:
            raise SandboxError(f"background command {self.number}: {self.lost}")
        return self.end or JobState(log_bytes=self.log_bytes, is_running=True)


@dataclass(slots=True)
class FolderJobs(Jobs):
    """Jobs of one lease, including those that an earlier process recorded."""

    folder: Path
    launch: Launch
    _all: dict[int, _Job] = field(init=False)

    def __post_init__(self) -> None:
        self._all = {job.number: job for job in _load_jobs(self.folder)}

    @property
    @override
    def may_run(self) -> bool:
        return bool(self._running())

    @property
    def is_intact(self) -> bool:
        """True if no job was lost with an earlier process."""
        return not any(job.lost for job in self._all.values())

    @override
    async def start(self, command: str, *, timeout_s: float | None) -> int:
        if len(self._running()) >= MAX_RUNNING:
            raise JobError(JobFault.TOO_MANY)
        self._forget()
        job = _Job(max(self._all, default=0) + 1)
        program = Program(
            argv=("sh", "-c", command),
            timeout_s=timeout_s or MAX_TIMEOUT_S,
            is_merged=True,
            shares_network=True,
        )
        self.folder.mkdir(mode=0o700, exist_ok=True)
        log = os.open(self._path(job.number, "log"), _NEW, 0o600)
        try:
            job.program = await self.launch(program)
        except BaseException as error:
            os.close(log)
            self._path(job.number, "log").unlink()
            if isinstance(error, InvalidFieldError):
                raise JobError(JobFault.TOO_LONG) from error
            raise
        self._all[job.number] = job
        job.task = asyncio.create_task(
            self._follow(job, job.program, log), name=f"job {job.number}"
        )
        return job.number

    @override
    async def state(self, job: int, *, wait_s: float = 0) -> JobState:
        found = self._find(job)
        if found.task is not None and wait_s > 0:
            await asyncio.wait([found.task], timeout=wait_s)
        return found.state()

    @override
    async def output(self, job: int, *, offset: int, size: int) -> bytes:
        self._find(job).state()
        log = os.open(self._path(job, "log"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(log, max(size, 0), offset)
        finally:
            os.close(log)

    @override
    async def send(self, job: int, data: bytes, *, end: bool) -> None:
        program = self._find(job).program
        if program is None:
            raise JobError(JobFault.NO_INPUT, job)
        try:
            is_taken = program.offer(data)
        except BrokenPipeError as error:
            raise JobError(JobFault.NO_INPUT, job) from error
        if not is_taken:
            raise JobError(JobFault.NOT_READING, job)
        if end:
            program.close_input()

    @override
    async def kill(self, job: int) -> None:
        found = self._find(job)
        if found.program is None or found.task is None:
            return
        found.program.signal(signal.SIGTERM)
        await asyncio.wait([found.task], timeout=TERM_GRACE_S)
        if found.program is not None:
            found.program.kill()
        await asyncio.wait([found.task])

    async def close(self) -> None:
        running = self._running()
        for job in running:
            if job.program is not None:
                job.program.kill()
        tasks = [job.task for job in running if job.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def end_lost(self) -> None:
        """Record lost jobs as killed, after a restore."""
        for job in self._all.values():
            if job.lost:
                job.lost = ""
                self._write_down(job, _KILLED, "", 0)

    async def _follow(self, job: _Job, program: PipedProgram, log: int) -> None:
        ended_for = ""
        try:
            async for piece in program.output():
                data = piece.data[: LOG_BYTES - job.log_bytes]
                os.write(log, data)
                job.log_bytes += len(data)
                if len(data) < len(piece.data) and not ended_for:
                    ended_for = "output"
                    program.kill()
            ending = await program.wait()
            self._write_down(job, ending.exit_code, ended_for or ending.ended_for, ending.cpu_ms)
        except (EtudeError, OSError) as error:
            job.lost = str(error)
        finally:
            os.close(log)
            await program.close()
            job.program = None

    def _write_down(self, job: _Job, exit_code: int, ended_for: str, cpu_ms: int) -> None:
        job.end = JobState(
            log_bytes=job.log_bytes,
            is_running=False,
            exit_code=exit_code,
            ended_for=ended_for,
            cpu_ms=cpu_ms,
        )
        atomic.write_text(self._path(job.number, "json"), json.dumps(asdict(job.end)))

    def _running(self) -> list[_Job]:
        return [job for job in self._all.values() if job.is_running]

    def _find(self, number: int) -> _Job:
        if number not in self._all:
            raise JobError(JobFault.NO_SUCH_JOB, number)
        return self._all[number]

    def _forget(self) -> None:
        if len(self._all) >= MAX_KNOWN:
            oldest = next(job.number for job in self._all.values() if not job.is_running)
            del self._all[oldest]
            for end in ("log", "json"):
                self._path(oldest, end).unlink(missing_ok=True)

    def _path(self, number: int, end: str) -> Path:
        return self.folder / f"{number}.{end}"


def _load_jobs(folder: Path) -> Iterator[_Job]:
    """Load the jobs of a folder, in order; those without an exit were lost."""
    for log in sorted(folder.glob("*.log"), key=lambda path: int(path.stem)):
        job = _Job(int(log.stem), log_bytes=log.stat().st_size)
        job.lost = "it was running when the host process ended"
        # After a crash of the machine the file is missing or empty.
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
            raw: dict[str, Any] = json.loads(log.with_suffix(".json").read_bytes())
            job.end, job.lost = JobState(**raw), ""
        yield job
