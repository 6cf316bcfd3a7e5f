"""Interactive programs run as background jobs of a sandbox's agent.

Covered: output while they run, input, time limit, exit. Not covered: terminals, separate streams,
more output than the agent keeps (LOG_BYTES; then it ends them), and signals that do not end a
program, which are dropped.
"""

import asyncio
import contextlib
import shlex
import signal
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field

from typing_extensions import override

from etude.agent.workspace import JobError, JobFault, Jobs, JobState
from etude.agent.workspace.jobs import INPUT_BYTES
from etude.common.backoff import Backoff
from etude.common.errors import FullError, InvalidFieldError, WrongStateError
from etude.envserver.drivers.base import SandboxError
from etude.envserver.drivers.programs import (
    OutputPiece,
    OutputStream,
    Program,
    ProgramExit,
    RunningProgram,
    TerminalSize,
)

_READ_BYTES = 64 << 10
_FIRST_S, _LONGEST_S = 0.05, 0.5
"""Poll intervals: each poll costs a guest 0.2 ms."""
_ENDING = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM})


async def start_program(jobs: Jobs, program: Program) -> "JobProgram":
    """Start a program as a background job.

    Raises:
        WrongStateError: it needs a terminal.
        FullError: too many run.
        InvalidFieldError: its command line is too long.
        SandboxError: the agent does not start it.
    """
    if program.terminal is not None:
        raise WrongStateError("this lease's driver has no terminals")
    try:
        number = await jobs.start(_line(program), timeout_s=program.timeout_s)
    except JobError as error:
        if error.fault is JobFault.TOO_MANY:
            raise FullError(str(error), retry_after_s=5) from error
        if error.fault is JobFault.TOO_LONG:
            raise InvalidFieldError("command", error.fault.value) from error
        raise SandboxError(str(error)) from error
    return JobProgram(number, jobs)


def _line(program: Program) -> str:
    words = [f"{name}={value}" for name, value in program.env.items()]
    line = shlex.join((*(("env", *words) if words else ()), *program.argv))
    return f"cd {shlex.quote('./' + program.cwd)} && exec {line}"


@dataclass(slots=True, eq=False)
class JobProgram(RunningProgram):
    """A background job that is polled."""

    number: int
    jobs: Jobs
    _steps: set[asyncio.Task[None]] = field(default_factory=set)

    @override
    async def output(self) -> AsyncIterator[OutputPiece]:
        offset, backoff = 0, Backoff(_FIRST_S, _LONGEST_S)
        while True:
            state = await self._state(backoff.next_s())
            while offset < state.log_bytes:
                data = await self.jobs.output(self.number, offset=offset, size=_READ_BYTES)
                if not data:
                    break
                offset += len(data)
                backoff.reset()
                yield OutputPiece(OutputStream.OUT, data)
            if not state.is_running:
                return

    @override
    async def wait(self) -> ProgramExit:
        while (state := await self._state(_LONGEST_S)).is_running:
            pass
        return ProgramExit(state.exit_code, state.ended_for, state.cpu_ms)

    @override
    async def write(self, data: bytes) -> None:
        backoff = Backoff(_FIRST_S, _LONGEST_S)
        while data:
            try:
                await self.jobs.send(self.number, data[:INPUT_BYTES], end=False)
            except JobError as error:
                if error.fault is not JobFault.NOT_READING:
                    return
                await asyncio.sleep(backoff.next_s())
            else:
                data = data[INPUT_BYTES:]
                backoff.reset()

    @override
    def close_input(self) -> None:
        self._later(self.jobs.send(self.number, b"", end=True))

    @override
    def signal(self, number: int) -> None:
        if number in _ENDING:
            self.kill()

    @override
    def resize(self, size: TerminalSize) -> None:
        return None

    @override
    def kill(self) -> None:
        self._later(self.jobs.kill(self.number))

    @override
    async def close(self) -> None:
        self.kill()
        await asyncio.wait(self._steps)

    async def _state(self, wait_s: float) -> JobState:
        try:
            return await self.jobs.state(self.number, wait_s=wait_s)
        except JobError as error:
            raise SandboxError(str(error)) from error

    def _later(self, step: Coroutine[None, None, None]) -> None:
        async def take() -> None:
            with contextlib.suppress(JobError):  # it has ended, or takes no input
                await step

        task = asyncio.create_task(take(), name=f"program {self.number}")
        self._steps.add(task)
        task.add_done_callback(self._steps.discard)
