"""Guest agents of either make, started for a test with a channel to each."""

import asyncio
import contextlib
import functools
import runpy
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from tests.support import needs

from etude.envserver.guest.channel import GuestChannel, GuestIdentity

ROOT = Path(__file__).parents[3]
AGENTS = ("go", "python")
TOKEN = b"a token of this generation"
START_S = 60.0
"""An interpreter on a busy machine may take seconds to start."""
REFERENCE = "tests.support.reference_guest.agent"
_T = TypeVar("_T")


@functools.cache
def program() -> Path:
    """The agent in Go, built if need be; without Go the test is skipped."""
    if shutil.which("go") is None and not needs.is_required("guest", "qemu"):
        pytest.skip("there is no go on PATH to build the guest agent with")
    built = runpy.run_path(str(ROOT / "hack" / "guest.py"))["build"]()
    assert isinstance(built, Path)
    return built


def command(agent: str) -> tuple[str, ...]:
    """How to start an agent of this make."""
    if agent == "go":
        return (str(program()),)
    # The root comes last on the path: its operator/ must not hide the standard library's.
    main = f"import sys; sys.path.append({str(ROOT)!r}); from {REFERENCE} import main; main()"
    return (sys.executable, "-c", main)


@dataclass(frozen=True, slots=True)
class Guest:
    """A running agent and the channel to it."""

    channel: GuestChannel
    process: Process


@contextlib.asynccontextmanager
async def raw(agent: str, root: Path) -> AsyncIterator[Process]:
    """An agent whose streams are the test's own."""
    state = root.with_name(root.name + "-state")
    process = await asyncio.create_subprocess_exec(
        *(*command(agent), "--stdio", "--root", str(root), "--state", str(state)),
        stdin=PIPE,
        stdout=PIPE,
        limit=1 << 20,
    )
    try:
        yield process
    finally:
        # An agent whose host has gone ends what it has started, and itself.
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(START_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def guest(agent: str, root: Path) -> AsyncIterator[Guest]:
    """An agent with this workspace, reset and in possession of its token."""
    async with raw(agent, root) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        channel = GuestChannel(process.stdout, process.stdin, ack_timeout_s=START_S)
        try:
            await channel.hello(timeout_s=START_S)
            await channel.reset()
            await channel.sync(GuestIdentity(env_id="test", token=TOKEN, generation=1))
            yield Guest(channel, process)
        finally:
            await channel.close()


@contextlib.contextmanager
def running(
    agents: tuple[str, ...], root: Path
) -> Iterator[Callable[[Callable[[dict[str, Guest]], Awaitable[_T]]], _T]]:
    """Agents that live through many examples: runs a coroutine function on them each time."""

    async def start(stack: contextlib.AsyncExitStack) -> dict[str, Guest]:
        for agent in agents:
            (root / agent).mkdir()
        return {
            agent: await stack.enter_async_context(guest(agent, root / agent)) for agent in agents
        }

    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        guests = runner.run(start(stack))

        async def call(use: Callable[[dict[str, Guest]], Awaitable[_T]]) -> _T:
            return await use(guests)

        try:
            yield lambda use: runner.run(call(use))
        finally:
            runner.run(stack.aclose())


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that nobody tells of."""
    async with asyncio.timeout(START_S):
        while not holds():  # noqa: ASYNC110 - the operating system has no event for it
            await asyncio.sleep(0.01)
