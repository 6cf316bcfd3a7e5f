"""Where the golden run is played: every workspace and driver by its name."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from tests.harness.golden.calls import ALL, Need
from tests.harness.golden.transcript import Stage
from tests.harness.golden.tree import TREE
from tests.support.vm import guests

from etude.agent.workspace import ExecResult, FolderWorkspace, MemoryWorkspace
from etude.envserver.drivers.base import Driver
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.storage import folders

Open = Callable[[Path], AbstractAsyncContextManager[Stage]]
"""Makes a stage in an empty folder."""


async def no_shell(command: str, timeout_s: float) -> ExecResult:
    """For workspaces without commands.

    Raises:
        AssertionError: always.
    """
    raise AssertionError((command, timeout_s))


@contextlib.asynccontextmanager
async def memory(_folder: Path) -> AsyncIterator[Stage]:
    """Files in a dict."""
    files = {path: file.content for path, file in TREE.items()}
    yield Stage(MemoryWorkspace(files, no_shell), frozenset())


@contextlib.asynccontextmanager
async def folder(folder: Path) -> AsyncIterator[Stage]:
    """Files of this machine."""
    folders.write_tree(folder / "root", TREE, folders.current_owner())
    yield Stage(FolderWorkspace(folder / "root", no_shell), frozenset())


def agent(name: str) -> Open:
    """Either guest agent on two pipes, without a machine around it."""

    @contextlib.asynccontextmanager
    async def opened(folder: Path) -> AsyncIterator[Stage]:
        folders.write_tree(folder / "root", TREE, folders.current_owner())
        async with guests.guest(name, folder / "root") as guest:
            commands = GuestCommands(channel=guest.channel)
            workspace = GuestWorkspace(
                guest.channel, commands.run, jobs=GuestJobs(channel=guest.channel)
            )
            yield Stage(workspace, ALL - {Need.WALL})

    return opened


@contextlib.asynccontextmanager
async def process(folder: Path) -> AsyncIterator[Stage]:
    """The process driver; raises DriverUnavailableError where it cannot run."""
    driver = ProcessDriver(folder)
    await driver.start()
    try:
        async with leased(driver, ALL) as stage:
            yield stage
    finally:
        await driver.stop()


@contextlib.asynccontextmanager
async def leased(
    driver: Driver, has: frozenset[Need], *, template: str = "golden"
) -> AsyncIterator[Stage]:
    """A sandbox of a driver that was started."""

    async def run(command: str, timeout_s: float) -> ExecResult:
        done = await sandbox.run(command, timeout_s)
        return ExecResult(
            output=done.output,
            exit_code=done.exit_code,
            timed_out=done.timed_out,
            ended_for=done.ended_for,
            dropped_bytes=done.dropped_bytes,
            dropped_lines=done.dropped_lines,
        )

    lease = driver.leases / "golden"
    await asyncio.to_thread(lease.mkdir)
    sandbox = driver.sandbox(lease, run, template=template)
    try:
        await sandbox.initialize(TREE)
        yield Stage(sandbox.workspace, has)
    finally:
        await sandbox.close()
        await asyncio.to_thread(folders.remove_folder, lease)


STAGES: dict[str, Open] = {
    "memory": memory,
    "folder": folder,
    "process": process,
    "reference-agent": agent("python"),
    "go-agent": agent("go"),
}
"""Those that need no machine; the tests of a driver with one play the run there themselves."""
