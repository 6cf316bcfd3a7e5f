"""The host's ends of a sandboxed program: pipes or terminal, and its supervisor."""

import asyncio
import contextlib
import errno
import os
import pty
import socket
import termios
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from etude.envserver.drivers.base import CommandOutcome
from etude.envserver.drivers.programs import (
    OutputPiece,
    OutputStream,
    ProgramExit,
    RunningProgram,
    TerminalSize,
)

_READ_BYTES = 64 << 10
_END_S = 5.0
"""A supervisor reports the end in milliseconds."""
_END_OF_INPUT = b"\x04"
"""End of input for a terminal, at the start of a line."""
_GONE = frozenset({errno.EIO, errno.EPIPE, errno.ECONNRESET, errno.EBADF})
"""Errors of a terminal or pipe whose other end is closed."""


class ProgramPipes(NamedTuple):
    """Both ends of a program's connections."""

    input: int
    outputs: dict[OutputStream, int]
    control: socket.socket
    """Takes signal numbers, one byte each; closing it ends the program."""
    theirs: Sequence[int]
    """The supervisor's ends: standard input, output, error, control."""


def open_pipes(terminal: TerminalSize | None, *, is_merged: bool = False) -> ProgramPipes:
    """Open connections for one program; merged, both outputs are one pipe."""
    control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    control.setblocking(False)  # noqa: FBT003 - the only way to say it
    if terminal is None and is_merged:
        (stdin, feed), (out, stdout) = os.pipe(), os.pipe()
        outputs = {OutputStream.OUT: out}
        theirs = [stdin, stdout, os.dup(stdout)]
    elif terminal is None:
        (stdin, feed), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
        outputs = {OutputStream.OUT: out, OutputStream.ERR: err}
        theirs = [stdin, stdout, stderr]
    else:
        out, inside = pty.openpty()
        termios.tcsetwinsize(inside, terminal)
        feed, outputs = os.dup(out), {OutputStream.OUT: out}
        theirs = [inside, os.dup(inside), os.dup(inside)]
    for descriptor in (feed, *outputs.values()):
        os.set_blocking(descriptor, False)
    return ProgramPipes(feed, outputs, control, (*theirs, their_control.detach()))


@dataclass(slots=True, eq=False)
class PipedProgram(RunningProgram):
    """A program with its connections, for one reader."""

    number: int
    pipes: ProgramPipes
    report: asyncio.Future[CommandOutcome]
    is_terminal: bool
    _outputs: dict[OutputStream, int] = field(init=False)
    _input: int = field(init=False)

    def __post_init__(self) -> None:
        self._outputs = dict(self.pipes.outputs)
        self._input = self.pipes.input

    @override
    async def output(self) -> AsyncIterator[OutputPiece]:
        while self._outputs:
            await self._readable()
            for stream in list(self._outputs):
                data = _read(self._outputs[stream])
                if data == b"":
                    os.close(self._outputs.pop(stream))
                elif data is not None:
                    yield OutputPiece(stream, data)

    @override
    async def wait(self) -> ProgramExit:
        outcome = await asyncio.shield(self.report)
        return ProgramExit(outcome.exit_code, outcome.ended_for, outcome.cpu_ms)

    @override
    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._input >= 0:
            try:
                view = view[os.write(self._input, view) :]
            except BlockingIOError:
                await self._writable()
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._close_feed()

    def offer(self, data: bytes) -> bool:
        """Write a little input, all or nothing; False if there is no room.

        Raises:
            BrokenPipeError: it takes no more input.
        """
        if self._input < 0:
            raise BrokenPipeError(errno.EPIPE, "the input has ended")
        try:
            os.write(self._input, data)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self._close_feed()
            raise
        return True

    @override
    def close_input(self) -> None:
        if self.is_terminal and self._input >= 0:
            with contextlib.suppress(OSError):  # the other end is closed, or it is full
                os.write(self._input, _END_OF_INPUT)
        else:
            self._close_feed()

    @override
    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.pipes.control.send(bytes([number]))

    @override
    def resize(self, size: TerminalSize) -> None:
        if self.is_terminal and self._input >= 0:
            with contextlib.suppress(OSError, termios.error):  # it has ended
                termios.tcsetwinsize(self._input, size)

    @override
    def kill(self) -> None:
        self.pipes.control.close()

    @override
    async def close(self) -> None:
        self.kill()
        self._close_feed()
        while self._outputs:
            _, descriptor = self._outputs.popitem()
            os.close(descriptor)
        done, _ = await asyncio.wait([self.report], timeout=_END_S)
        for report in done:
            if not report.cancelled():
                report.exception()  # marked as retrieved: there may be no waiter left

    def _close_feed(self) -> None:
        if self._input >= 0:
            asyncio.get_running_loop().remove_writer(self._input)
            os.close(self._input)
            self._input = -1

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        watched = list(self._outputs.values())
        await _first(
            lambda wake: [loop.add_reader(descriptor, wake) for descriptor in watched],
            lambda: [loop.remove_reader(descriptor) for descriptor in watched],
        )

    async def _writable(self) -> None:
        loop, descriptor = asyncio.get_running_loop(), self._input
        await _first(
            lambda wake: [loop.add_writer(descriptor, wake)],
            lambda: [loop.remove_writer(descriptor)],
        )


async def _first(
    watch: Callable[[Callable[[], None]], object], leave: Callable[[], object]
) -> None:
    event = asyncio.Event()
    watch(event.set)
    try:
        await event.wait()
    finally:
        leave()


def _read(descriptor: int) -> bytes | None:
    """Read what is there: None for nothing yet, no bytes at the end.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return b""
