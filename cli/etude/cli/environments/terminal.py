"""A program in an environment, connected to this process's own streams."""

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from etude.cli.environments.lease_store import EnvironmentLease
from etude.v1 import environment_access_pb2 as pb2

if TYPE_CHECKING:
    from etude.v1 import environment_access_pb2_grpc

_READ_BYTES = 64 << 10
_STEPS = 8
"""Steps that wait to be sent; then this process stops reading its input."""

Steps = asyncio.Queue[pb2.ExecRequest | None]
"""Input and resizes of the user, in order; None is the end of the input."""


def is_terminal() -> bool:
    """True if this process has a terminal for input and output."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def open_message(environment: EnvironmentLease, argv: Sequence[str], **fields: Any) -> pb2.ExecOpen:  # noqa: ANN401 - fields of the message
    """The message that starts a program."""
    return pb2.ExecOpen(
        lease_id=environment.name,
        control_token=environment.lease.control_token,
        argv=pb2.ArgumentList(arguments=argv),
        **fields,
    )


def terminal_size() -> pb2.TerminalSize:
    """The size of this process's terminal."""
    rows, columns = termios.tcgetwinsize(sys.stdout.fileno())
    return pb2.TerminalSize(rows=rows or 24, columns=columns or 80)


async def attach(
    access: "environment_access_pb2_grpc.EnvAccessServiceAsyncStub",
    opening: pb2.ExecOpen,
    *,
    has_input: bool,
) -> pb2.ExecExit:
    """Run a program: its output goes to ours, and our input to it."""
    call = access.Exec()
    await call.write(pb2.ExecRequest(open=opening))
    steps: Steps = asyncio.Queue(_STEPS)
    feeder = asyncio.create_task(_feed(call, steps), name="input")
    ending = pb2.ExecExit()
    try:
        first = await call.read()  # a refusal comes before the terminal is changed
        if isinstance(first, pb2.ExecResponse):
            _listen(steps, has_input=has_input)
        with _raw(steps) if opening.HasField("terminal") else contextlib.nullcontext():
            while isinstance(news := await call.read(), pb2.ExecResponse):
                ending = news.exit if news.HasField("exit") else ending
                _show(news)
    finally:
        feeder.cancel()
        await asyncio.wait([feeder])
        call.cancel()
    return ending


async def _feed(call: Any, steps: Steps) -> None:  # noqa: ANN401 - gRPC's classes have no such type
    # The call itself reports the end to a user who types on.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (step := await steps.get()) is not None:
            await call.write(step)
        await call.done_writing()


def _listen(steps: Steps, *, has_input: bool) -> None:
    if not has_input:
        steps.put_nowait(None)
        return
    arguments = (steps, asyncio.get_running_loop())
    # It may wait for a key for ever: a daemon thread keeps no process alive.
    threading.Thread(target=_read_input, args=arguments, daemon=True, name="stdin").start()


def _read_input(steps: Steps, loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError, concurrent.futures.CancelledError):  # all is over
        data = b"-"
        while data:
            data = os.read(sys.stdin.fileno(), _READ_BYTES)
            step = pb2.ExecRequest(stdin=data) if data else None
            asyncio.run_coroutine_threadsafe(steps.put(step), loop).result()


@contextlib.contextmanager
def _raw(steps: Steps) -> Iterator[None]:
    """Send every key and every change of size to the environment."""

    def resized() -> None:
        with contextlib.suppress(asyncio.QueueFull):
            steps.put_nowait(pb2.ExecRequest(resize=terminal_size()))

    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    tty.setraw(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        loop.remove_signal_handler(signal.SIGWINCH)


def _show(news: pb2.ExecResponse) -> None:
    for stream, data in ((sys.stdout, news.stdout), (sys.stderr, news.stderr)):
        if data:
            stream.buffer.write(data)
            stream.buffer.flush()
