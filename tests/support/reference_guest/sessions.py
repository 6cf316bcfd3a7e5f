"""Sessions as the reference agent does them, and who does each operation on processes."""

import asyncio
import os
import shlex
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tests.support.reference_guest.calls import Call, Operation, RefusedError
from tests.support.reference_guest.jobs import Jobs, exec_in_background, job
from tests.support.reference_guest.processes import (
    DRAIN_S,
    MAX_KEPT_BYTES,
    ended,
    exit_of,
    kill,
    pump,
    run_in_foreground,
    start,
)

from etude.envserver.drivers.process.supervisor import HeadTailBuffer
from etude.v1 import guest_pb2

_MAX_SESSIONS = 16


class _HasProcesses(Protocol):
    @property
    def jobs(self) -> Jobs: ...
    @property
    def sessions(self) -> "Sessions": ...


async def _exec(call: Call, agent: _HasProcesses) -> guest_pb2.GuestResult:
    asked = call.request.exec
    if asked.session:
        return await _exec_in_session(call, agent)
    if asked.background:
        return await exec_in_background(call, agent)
    return await run_in_foreground(call)


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
    named[asked.name] = _Shell(await start(call, [b"sh"], asked.env, **pipes))


async def _end(shell: _Shell) -> int:
    kill(shell.process, signal.SIGKILL)
    return await exit_of(shell.process)


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
    kept = HeadTailBuffer(
        min(asked.head_bytes, MAX_KEPT_BYTES), min(asked.tail_bytes, MAX_KEPT_BYTES)
    )
    done = await _run_in_shell(shell, call, kept)
    shell.is_busy = False
    if done is None or done.timed_out:
        named.pop(asked.session, None)
        status = ended(await _end(shell))
        status.MergeFrom(done or guest_pb2.GuestExecResult())
        done = status
    output, done.dropped_out, done.dropped_lines_out = kept.result()
    await call.data(1, output)
    return guest_pb2.GuestResult(exec=done)


async def _run_in_shell(
    shell: _Shell, call: Call, kept: HeadTailBuffer
) -> guest_pb2.GuestExecResult | None:
    """What the line came to; None when the shell ended with it."""
    asked = call.request.exec
    lines, output, told = shell.process.stdin, shell.process.stdout, shell.process.stderr
    if lines is None or output is None or told is None:
        return None
    quoted = shlex.quote(os.fsdecode(asked.shell))
    script = f"eval {quoted} </dev/null 2>&1\nprintf '%d\\n' $? >&2\n"
    reading = asyncio.create_task(pump(output, kept), name="output of a session")
    call.on_signal = lambda number: kill(shell.process, number)
    try:
        lines.write(os.fsencode(script))
        async with asyncio.timeout(asked.timeout_ms / 1000 or None):
            status = await told.readline()
    except TimeoutError:
        return guest_pb2.GuestExecResult(timed_out=True, ended_for="time")
    finally:
        # What was written before the status is in the pipe by now, and read in one turn.
        await asyncio.wait([reading], timeout=DRAIN_S)
        reading.cancel()
    text = status.strip()
    return guest_pb2.GuestExecResult(exit_code=int(text)) if text.isdigit() else None


async def _freeze(_call: Call, _agent: object) -> None:
    why = "only the first process of a VM freezes its disk"
    raise RefusedError(guest_pb2.GUEST_STATUS_DENIED, why)


PROCESSES: Mapping[str, Operation] = {
    "exec": _exec,
    "job": job,
    "session": _session,
    "freeze_fs": _freeze,
    "thaw_fs": _freeze,
}
"""What does each operation on processes, and on the machine."""
