"""The sandbox of one lease as a virtual machine of its own."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace import ExecResult, Workspace
from etude.agent.workspace.protocol import HOME, Runner
from etude.envserver.drivers.base import Outcome, Sandbox, SandboxError
from etude.envserver.drivers.qemu.guests import Guest
from etude.envserver.drivers.qemu.placing import place
from etude.envserver.folders import FolderContent, Limits
from etude.envserver.guest import contents
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.trees import Tree

MACHINE = "machine"
"""Folder of the machine in that of its lease."""

Launch = Callable[[Path], Awaitable[Guest]]
"""Makes a machine in an empty folder."""


class VmSandbox(Sandbox):
    """A machine that is made when the first call comes."""

    def __init__(self, folder: Path, runner: Runner, launch: Launch) -> None:
        """Nothing runs yet.

        Args:
            folder: the lease's.
            runner: for the workspace's commands.
            launch: makes the machine.
        """
        self._folder = folder / MACHINE
        self._runner = runner
        self._launch = launch
        self._guest: Guest | None = None

    @property
    @override
    def workspace(self) -> Workspace:  # type: ignore[override] # read only, and once there is one
        return GuestWorkspace(self._running.channel, self._runner)

    @property
    @override
    def has_begun(self) -> bool:
        return self._folder.exists()

    @override
    async def begin(self, tree: Tree) -> None:
        self._folder.mkdir(mode=0o700)
        guest = await self._launch(self._folder)
        try:
            await place(guest.channel, tree, root=HOME)
        except BaseException:
            await guest.destroy()
            raise
        self._guest = guest

    @override
    async def run(self, command: str, timeout_s: float) -> Outcome:
        return outcome(await GuestCommands(channel=self._running.channel).run(command, timeout_s))

    @override
    async def content(self, limits: Limits) -> FolderContent:
        return await contents.content(self._running.channel, limits)

    @override
    async def close(self) -> None:
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.destroy()

    @property
    def _running(self) -> Guest:
        if self._guest is None:
            raise SandboxError("the machine of this lease has ended")
        return self._guest


def outcome(done: ExecResult, collected: bytes | None = None) -> Outcome:
    """What a command did, as nodes see it."""
    return Outcome(
        output=done.output,
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        ended_for=done.ended_for,
        dropped_bytes=done.dropped_bytes,
        dropped_lines=done.dropped_lines,
        cpu_ms=done.cpu_ms,
        collected=collected,
    )
