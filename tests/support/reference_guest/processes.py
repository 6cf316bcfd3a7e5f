"""Commands as the reference agent does them.

Covered: a command's process group ends with it. Not covered, unlike in the Go agent: a process that
made a session of its own.
"""

import asyncio
import contextlib
import os
import resource
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from tests.support.reference_guest.calls import Call, RefusedError

from etude.envserver.drivers.process.supervisor import HeadTailBuffer
from etude.v1 import guest_pb2

TERM_GRACE_S = 2.0
DRAIN_S = 0.2
_WATCH_S = 0.1
_REAP_S = 0.005
"""Between an exit and its status, which another thread fetches."""
MAX_KEPT_BYTES = 1 << 20
_MAX_ARGUMENTS = 4096
_SHELL_NAME = b"sh"
"""Shells begin their complaints with it, on every driver with the same."""
_READ_BYTES = 1 << 16


def kill(process: Process, number: int) -> None:
    """Send a signal to a process and its group, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def start(
    call: Call,
    argv: Sequence[bytes | str],
    env: Mapping[str, str],
    **options: int | str | IO[bytes],
) -> Process:
    """Start a process in a session of its own; limits are set as soon as it runs.

    Raises:
        RefusedError: there is no such program.
        CancelledError: the call was ended, and so is the process.
    """
    options |= {"executable": "/bin/sh"} if argv[0] == _SHELL_NAME else {}
    user = {} if call.uid is None else {"user": call.uid, "group": call.uid, "extra_groups": []}
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            argv[0],
            *argv[1:],
            cwd=call.folder,
            env=dict(env),
            start_new_session=True,
            **options,  # type: ignore[arg-type] # stdin, stdout and stderr
            **user,  # type: ignore[arg-type] # three keywords at once
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # Cancelled half-way, asyncio would kill the process and leave its children.
        kill(await starting, signal.SIGKILL)
        raise
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


def arguments(asked: guest_pb2.GuestExec) -> list[bytes]:
    """The program and its arguments.

    Raises:
        RefusedError: there is no program.
    """
    if asked.shell:
        return [_SHELL_NAME, b"-c", asked.shell]
    if not asked.argv or len(asked.argv) > _MAX_ARGUMENTS or not asked.argv[0]:
        wrong = "no command, or too many arguments"
        raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, wrong)
    return list(asked.argv)


async def run_in_foreground(call: Call) -> guest_pb2.GuestResult:
    """Run the call's command to its end."""
    asked = call.request.exec
    process = await start(
        call,
        arguments(asked),
        asked.env,
        stdin=PIPE if asked.has_input else DEVNULL,
        stdout=PIPE,
        stderr=STDOUT if asked.merged else PIPE,
    )
    run = _Command(call, process)
    try:
        return await run.finish()
    finally:
        kill(process, signal.SIGKILL)


class _Command:
    """A foreground command and why it is being ended."""

    def __init__(self, call: Call, process: Process) -> None:
        asked = call.request.exec
        head, tail = (min(n, MAX_KEPT_BYTES) for n in (asked.head_bytes, asked.tail_bytes))
        self._call, self._process, self._limits = call, process, asked.limits
        self._timeout_s = asked.timeout_ms / 1000 or None
        streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        self._kept = [HeadTailBuffer(head, tail) for _ in streams]
        self._pumps = [
            asyncio.create_task(pump(stream, kept), name="output")
            for stream, kept in zip(streams, self._kept, strict=True)
        ]
        self._ended_for = ""

    async def finish(self) -> guest_pb2.GuestResult:
        """Wait for the end, or bring it about, and send what was kept."""
        helpers = [asyncio.create_task(self._watch(), name="watch")]
        if self._process.stdin is not None:
            helpers.append(asyncio.create_task(self._feed(), name="input"))
        self._call.on_signal = lambda number: kill(self._process, number)
        try:
            status = await exit_of(self._process)
        finally:
            for task in helpers:
                task.cancel()
        await asyncio.wait(self._pumps, timeout=DRAIN_S)
        for task in self._pumps:
            task.cancel()
        return await self._report(status)

    async def _watch(self) -> None:
        started_s = asyncio.get_running_loop().time()
        # On a disk that is full already a command may still delete files.
        least_free = min(self._limits.min_free_bytes, self._free_bytes())
        while not self._ended_for:
            await asyncio.sleep(_WATCH_S if self._timeout_s is None else _WATCH_S / 10)
            passed_s = asyncio.get_running_loop().time() - started_s
            flood = self._limits.flood_bytes
            if self._timeout_s is not None and passed_s >= self._timeout_s:
                self._ended_for = "time"
            elif flood and any(kept.total > flood for kept in self._kept):
                self._ended_for = "output"
            elif self._free_bytes() < least_free:
                self._ended_for = "disk"
        kill(self._process, signal.SIGTERM)
        await asyncio.sleep(0 if self._ended_for == "disk" else TERM_GRACE_S)
        kill(self._process, signal.SIGKILL)

    def _free_bytes(self) -> int:
        found = os.statvfs(self._call.folder)
        return found.f_bavail * found.f_frsize

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
        done = ended(status)
        done.timed_out, done.ended_for = self._ended_for == "time", self._ended_for
        for channel, kept in enumerate(self._kept, 1):
            output, dropped, lines = kept.result()
            if channel == 1:
                done.dropped_out, done.dropped_lines_out = dropped, lines
            else:
                done.dropped_err, done.dropped_lines_err = dropped, lines
            await self._call.data(channel, output)
        return guest_pb2.GuestResult(exec=done)


async def exit_of(process: Process) -> int:
    """The status of a process, whose group ends with it.

    asyncio itself would also wait for whoever else holds the process's pipes.
    """
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        loop.add_reader(descriptor, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    kill(process, signal.SIGKILL)
    while process.returncode is None:  # noqa: ASYNC110 - nothing tells of it before the pipes close
        await asyncio.sleep(_REAP_S)
    return process.returncode


async def pump(stream: asyncio.StreamReader, kept: HeadTailBuffer) -> None:
    """Keep what comes until nobody writes any more."""
    while data := await stream.read(_READ_BYTES):
        kept.add(data)


def ended(status: int) -> guest_pb2.GuestExecResult:
    """How a process ended, from asyncio's status."""
    if status < 0:
        return guest_pb2.GuestExecResult(signal=-status)
    return guest_pb2.GuestExecResult(exit_code=status)
