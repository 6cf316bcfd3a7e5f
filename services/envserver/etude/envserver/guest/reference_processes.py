"""Commands, background jobs and sessions as the reference agent does them.

Covered: a command's process group ends with it. Not covered, unlike in the Go agent: a process that
made a session of its own.
"""

import asyncio
import contextlib
import os
import resource
import shlex
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from etude.envserver.drivers.sandbox.supervisor import Kept
from etude.envserver.guest.reference_calls import Call, Operation, RefusedError
from etude.v1 import guest_pb2

_TERM_GRACE_S = 2.0
_DRAIN_S = 0.2
_WATCH_S = 0.1
_REAP_S = 0.005
"""Between an exit and its status, which another thread fetches."""
_MAX_KEPT_BYTES = 1 << 20
_MAX_ARGUMENTS = 4096
_MAX_RUNNING_JOBS = 64
_MAX_SESSIONS = 16
_DEFAULT_JOB_READ, _MAX_JOB_READ = 64 << 10, 1 << 20
_READ_BYTES = 1 << 16


class _HasProcesses(Protocol):
    @property
    def jobs(self) -> "Jobs": ...
    @property
    def sessions(self) -> "Sessions": ...


def _kill(process: Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _start(
    call: Call, argv: Sequence[bytes | str], env: Mapping[str, str], **options: int | IO[bytes]
) -> Process:
    """Start a process in a session of its own; limits are set as soon as it runs.

    Raises:
        RefusedError: there is no such program.
    """
    user = {} if call.uid is None else {"user": call.uid, "group": call.uid, "extra_groups": []}
    try:
        process = await asyncio.create_subprocess_exec(
            argv[0],
            *argv[1:],
            cwd=call.folder,
            env=dict(env),
            start_new_session=True,
            **options,  # type: ignore[arg-type] # stdin, stdout and stderr
            **user,  # type: ignore[arg-type] # three keywords at once
        )
    except FileNotFoundError as error:
        raise RefusedError(guest_pb2.GUEST_STATUS_NOT_FOUND, str(error)) from error
    for which, value in _limits(call.request.exec.limits):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, which, (value, value))
    return process


def _limits(asked: guest_pb2.GuestLimits) -> Iterator[tuple[int, int]]:
    yield resource.RLIMIT_CORE, 0
    for which, value in (
        (resource.RLIMIT_NPROC, asked.processes),
        (resource.RLIMIT_NOFILE, asked.open_files),
        (resource.RLIMIT_FSIZE, asked.file_bytes),
        (resource.RLIMIT_AS, asked.memory_bytes),
    ):
        if value:
            yield which, value


def _arguments(asked: guest_pb2.GuestExec) -> list[bytes]:
    if asked.shell:
        return [b"/bin/sh", b"-c", asked.shell]
    if not asked.argv or len(asked.argv) > _MAX_ARGUMENTS or not asked.argv[0]:
        wrong = "no command, or too many arguments"
        raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, wrong)
    return list(asked.argv)


async def _exec(call: Call, agent: _HasProcesses) -> guest_pb2.GuestResult:
    asked = call.request.exec
    if asked.session:
        return await _exec_in_session(call, agent)
    if asked.background:
        return await _exec_in_background(call, agent)
    process = await _start(
        call,
        _arguments(asked),
        asked.env,
        stdin=PIPE if asked.has_input else DEVNULL,
        stdout=PIPE,
        stderr=STDOUT if asked.merged else PIPE,
    )
    run = _Command(call, process)
    try:
        return await run.finish()
    finally:
        _kill(process, signal.SIGKILL)


class _Command:
    """A foreground command and why it is being ended."""

    def __init__(self, call: Call, process: Process) -> None:
        asked = call.request.exec
        head, tail = (min(n, _MAX_KEPT_BYTES) for n in (asked.head_bytes, asked.tail_bytes))
        self._call, self._process, self._limits = call, process, asked.limits
        self._timeout_s = asked.timeout_ms / 1000 or None
        streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        self._kept = [Kept(head, tail) for _ in streams]
        self._pumps = [
            asyncio.create_task(_pump(stream, kept), name="output")
            for stream, kept in zip(streams, self._kept, strict=True)
        ]
        self._ended_for = ""

    async def finish(self) -> guest_pb2.GuestResult:
        """Wait for the end, or bring it about, and send what was kept."""
        helpers = [asyncio.create_task(self._watch(), name="watch")]
        if self._process.stdin is not None:
            helpers.append(asyncio.create_task(self._feed(), name="input"))
        self._call.on_signal = lambda number: _kill(self._process, number)
        try:
            status = await _exit_of(self._process)
        finally:
            for task in helpers:
                task.cancel()
        await asyncio.wait(self._pumps, timeout=_DRAIN_S)
        for pump in self._pumps:
            pump.cancel()
        return await self._report(status)

    async def _watch(self) -> None:
        started_s = asyncio.get_running_loop().time()
        while not self._ended_for:
            await asyncio.sleep(_WATCH_S if self._timeout_s is None else _WATCH_S / 10)
            passed_s = asyncio.get_running_loop().time() - started_s
            flood = self._limits.flood_bytes
            if self._timeout_s is not None and passed_s >= self._timeout_s:
                self._ended_for = "time"
            elif flood and any(kept.total > flood for kept in self._kept):
                self._ended_for = "output"
            elif self._is_disk_full():
                self._ended_for = "disk"
        _kill(self._process, signal.SIGTERM)
        await asyncio.sleep(0 if self._ended_for == "disk" else _TERM_GRACE_S)
        _kill(self._process, signal.SIGKILL)

    def _is_disk_full(self) -> bool:
        found = os.statvfs(self._call.folder)
        return found.f_bavail * found.f_frsize < self._limits.min_free_bytes

    async def _feed(self) -> None:
        to = self._process.stdin
        if to is None:
            return
        with contextlib.suppress(ConnectionError):
            while (piece := await self._call.receive()) is not None:
                to.write(piece)
                await to.drain()
        to.close()

    async def _report(self, status: int) -> guest_pb2.GuestResult:
        done = _ended(status)
        done.timed_out, done.ended_for = self._ended_for == "time", self._ended_for
        for channel, kept in enumerate(self._kept, 1):
            output, dropped, lines = kept.result()
            if channel == 1:
                done.dropped_out, done.dropped_lines_out = dropped, lines
            else:
                done.dropped_err, done.dropped_lines_err = dropped, lines
            await self._call.data(channel, output)
        return guest_pb2.GuestResult(exec=done)


async def _exit_of(process: Process) -> int:
    """The status of a process, whose group ends with it.

    asyncio itself would also wait for whoever else holds the process's pipes.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    _kill(process, signal.SIGKILL)
    while process.returncode is None:
        await asyncio.sleep(_REAP_S)
    return process.returncode


async def _pump(stream: asyncio.StreamReader, kept: Kept) -> None:
    while data := await stream.read(_READ_BYTES):
        kept.add(data)


def _ended(status: int) -> guest_pb2.GuestExecResult:
    if status < 0:
        return guest_pb2.GuestExecResult(signal=-status)
    return guest_pb2.GuestExecResult(exit_code=status)


@dataclass(slots=True)
class _Job:
    number: int
    call_id: bytes
    log: Path
    process: Process
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 0
    watch: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Jobs:
    """Commands that nobody waits for; their output is in files."""

    folder: Path
    on_end: Callable[[guest_pb2.GuestJobExit], None]
    _all: dict[int, _Job] = field(default_factory=dict)
    _last: int = 0

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
                _kill(job.process, signal.SIGKILL)

    async def start(self, call: Call) -> int:
        """Start the call's command.

        Raises:
            RefusedError: too many run already.
        """
        if len(self.open()) >= _MAX_RUNNING_JOBS:
            raise RefusedError(guest_pb2.GUEST_STATUS_BUSY, "too many background jobs")
        asked = call.request.exec
        self._last += 1
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / f"job-{self._last}.log"
        with path.open("xb") as log:
            process = await _start(
                call, _arguments(asked), asked.env, stdin=DEVNULL, stdout=log, stderr=log
            )
        job = self._all[self._last] = _Job(self._last, call.request.id, path, process)
        job.watch = asyncio.create_task(self._watch(job, asked.timeout_ms / 1000 or None))
        return job.number

    def find(self, number: int) -> _Job:
        """The job with this number.

        Raises:
            RefusedError: there is none.
        """
        if number not in self._all:
            raise RefusedError(guest_pb2.GUEST_STATUS_NOT_FOUND, "no such job")
        return self._all[number]

    async def _watch(self, job: _Job, limit_s: float | None) -> None:
        try:
            job.status = await asyncio.wait_for(_exit_of(job.process), limit_s)
        except TimeoutError:
            _kill(job.process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(_exit_of(job.process), _TERM_GRACE_S)
            _kill(job.process, signal.SIGKILL)
            job.status = await _exit_of(job.process)
        job.ended.set()
        done = _ended(job.status)
        self.on_end(
            guest_pb2.GuestJobExit(job=job.number, exit_code=done.exit_code, signal=done.signal)
        )


async def _exec_in_background(call: Call, agent: _HasProcesses) -> guest_pb2.GuestResult:
    number = await agent.jobs.start(call)
    return guest_pb2.GuestResult(exec=guest_pb2.GuestExecResult(job=number, is_running=True))


async def _job(call: Call, agent: _HasProcesses) -> guest_pb2.GuestResult:
    asked = call.request.job
    job = agent.jobs.find(asked.job)
    match asked.operation:
        case guest_pb2.GUEST_JOB_OPERATION_STATUS:
            pass
        case guest_pb2.GUEST_JOB_OPERATION_READ:
            limit = min(asked.limit, _MAX_JOB_READ) or _DEFAULT_JOB_READ
            with job.log.open("rb") as log:
                log.seek(asked.offset)
                piece = log.read(limit)
            await call.data(1, piece)
        case guest_pb2.GUEST_JOB_OPERATION_KILL | guest_pb2.GUEST_JOB_OPERATION_AWAIT:
            if asked.operation == guest_pb2.GUEST_JOB_OPERATION_KILL:
                _kill(job.process, signal.SIGKILL)
            await job.ended.wait()
        case _:
            raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, "no such operation on a job")
    done = _ended(job.status)
    done.job, done.is_running = job.number, not job.ended.is_set()
    done.log_bytes = job.log.stat().st_size
    return guest_pb2.GuestResult(exec=done)


@dataclass(slots=True)
class _Shell:
    process: Process
    is_busy: bool = False


@dataclass(slots=True)
class Sessions:
    """Named shells that keep their folder and variables."""

    named: dict[str, _Shell] = field(default_factory=dict)


async def _session(call: Call, agent: _HasProcesses) -> None:
    asked, named = call.request.session, agent.sessions.named
    if asked.close:
        if asked.name not in named:
            raise RefusedError(guest_pb2.GUEST_STATUS_NOT_FOUND, "no such session")
        await _end(named.pop(asked.name))
        return
    if not asked.name or asked.name in named or len(named) >= _MAX_SESSIONS:
        wrong = "no name for a session, one that is taken, or too many of them"
        raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, wrong)
    pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE}
    named[asked.name] = _Shell(await _start(call, ["/bin/sh"], asked.env, **pipes))


async def _end(shell: _Shell) -> int:
    _kill(shell.process, signal.SIGKILL)
    return await _exit_of(shell.process)


async def _exec_in_session(call: Call, agent: _HasProcesses) -> guest_pb2.GuestResult:
    asked, named = call.request.exec, agent.sessions.named
    shell = named.get(asked.session)
    if shell is None:
        raise RefusedError(guest_pb2.GUEST_STATUS_NOT_FOUND, "no such session")
    if not asked.shell or asked.background:
        wrong = "a session runs a line in the foreground"
        raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, wrong)
    if shell.is_busy:
        raise RefusedError(guest_pb2.GUEST_STATUS_BUSY, "the session runs another command")
    shell.is_busy = True
    kept = Kept(min(asked.head_bytes, _MAX_KEPT_BYTES), min(asked.tail_bytes, _MAX_KEPT_BYTES))
    done = await _run_in_shell(shell, call, kept)
    shell.is_busy = False
    if done is None or done.timed_out:
        named.pop(asked.session, None)
        ended = _ended(await _end(shell))
        ended.MergeFrom(done or guest_pb2.GuestExecResult())
        done = ended
    output, done.dropped_out, done.dropped_lines_out = kept.result()
    await call.data(1, output)
    return guest_pb2.GuestResult(exec=done)


async def _run_in_shell(shell: _Shell, call: Call, kept: Kept) -> guest_pb2.GuestExecResult | None:
    """What the line came to; None when the shell ended with it."""
    asked = call.request.exec
    lines, output, told = shell.process.stdin, shell.process.stdout, shell.process.stderr
    if lines is None or output is None or told is None:
        return None
    quoted = shlex.quote(os.fsdecode(asked.shell))
    script = f"eval {quoted} </dev/null 2>&1\nprintf '%d\\n' $? >&2\n"
    pump = asyncio.create_task(_pump(output, kept), name="output of a session")
    call.on_signal = lambda number: _kill(shell.process, number)
    try:
        lines.write(os.fsencode(script))
        async with asyncio.timeout(asked.timeout_ms / 1000 or None):
            status = await told.readline()
    except TimeoutError:
        return guest_pb2.GuestExecResult(timed_out=True, ended_for="time")
    finally:
        # What was written before the status is in the pipe by now, and read in one turn.
        await asyncio.wait([pump], timeout=_DRAIN_S)
        pump.cancel()
    text = status.strip()
    return guest_pb2.GuestExecResult(exit_code=int(text)) if text.isdigit() else None


async def _freeze(_call: Call, _agent: object) -> None:
    why = "only the first process of a machine freezes its disk"
    raise RefusedError(guest_pb2.GUEST_STATUS_DENIED, why)


PROCESSES: Mapping[str, Operation] = {
    "exec": _exec,
    "job": _job,
    "session": _session,
    "freeze_fs": _freeze,
    "thaw_fs": _freeze,
}
"""What does each operation on processes, and on the machine."""
