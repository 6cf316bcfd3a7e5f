"""The sandbox of one lease as a virtual machine of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace import ExecResult, FolderNotes, Workspace, notes
from etude.agent.workspace.protocol import HOME, Originals, Runner
from etude.common.errors import CorruptError
from etude.envserver.drivers.base import CapMissingError, Outcome, Sandbox, SandboxError, Saved
from etude.envserver.drivers.qemu import record
from etude.envserver.drivers.qemu.census import MACHINE
from etude.envserver.drivers.qemu.errors import VmmError
from etude.envserver.drivers.qemu.guests import Guest
from etude.envserver.drivers.qemu.placing import place
from etude.envserver.folders import FolderContent, Limits
from etude.envserver.guest import contents
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.trees import Tree

Launch = Callable[[Path], Awaitable[Guest]]
"""Makes a machine in an empty folder."""


class VmSandbox(Sandbox):
    """A machine that is made when the first call comes."""

    def __init__(
        self, folder: Path, runner: Runner, launch: Launch, guest: Guest | None = None
    ) -> None:
        """Nothing is started.

        Args:
            folder: the lease's.
            runner: for the workspace's commands.
            launch: makes the machine.
            guest: the machine, if an earlier process began it.
        """
        self._folder = folder / MACHINE
        self._runner = runner
        self._launch = launch
        self._guest = guest
        self._originals = Originals()
        self._notes = FolderNotes(folder / notes.FOLDER)
        self._jobs: GuestJobs | None = None

    @property
    @override
    def workspace(self) -> Workspace:  # type: ignore[override] # read only, and once there is one
        channel = self._running.channel
        if self._jobs is None or self._jobs.channel is not channel:
            self._jobs = GuestJobs(channel=channel)
        return GuestWorkspace(
            channel,
            self._runner,
            originals=self._originals,
            notes=self._notes,
            jobs=self._jobs,
        )

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
            # From here on a successor of this process goes on with the machine.
            await asyncio.to_thread(_note, guest)
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
    async def save(self, folder: Path, limits: Limits) -> Saved:
        raise CapMissingError("qemu-microvm", "files", "it saves nothing")

    @override
    async def restore(self, folder: Path, saved: Saved) -> None:
        raise CapMissingError("qemu-microvm", "files", "it saves nothing")

    @override
    async def pause(self) -> None:
        raise CapMissingError("qemu-microvm", "files", "what is paused is kept in files")

    @override
    async def resume(self) -> None:
        return None

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


def _note(guest: Guest) -> None:
    """Write down whose machine it is.

    Raises:
        VmmError: it cannot be written down.
    """
    identity = guest.identity
    try:
        record.begin(guest.vm.folder, env_id=identity.env_id, generation=identity.generation)
    except (OSError, CorruptError) as cause:
        raise VmmError(f"machine {guest.vm.pid} cannot be written down: {cause}") from cause


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
