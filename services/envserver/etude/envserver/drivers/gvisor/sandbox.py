"""Sandbox of one lease as a gVisor container.

lease/gvisor/current        name of the container's folder, written once it runs
            /<name>/        a container: its bundle, its pipes, its record
            /paused/        a checkpoint, while the lease is suspended to disk
"""

import asyncio
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace import FolderNotes, Workspace, notes
from etude.agent.workspace.interface import HOME, Runner
from etude.common.errors import crossing
from etude.envserver.drivers import guest_grading, job_programs
from etude.envserver.drivers.base import (
    CommandOutcome,
    Sandbox,
    SandboxError,
    SandboxStart,
    SavedSandbox,
    StartKind,
)
from etude.envserver.drivers.gvisor import checkpoints
from etude.envserver.drivers.gvisor.container import CONFIG, GvisorContainer
from etude.envserver.drivers.gvisor.runsc import RunscClient
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.guest import workspace_files
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.storage.folders import FolderContent, FolderLimits
from etude.envserver.storage.trees import Tree

FOLDER, CURRENT, PAUSED = "gvisor", "current", "paused"
OF = "of"
"""File in a checkpoint: the name of its container's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFactory:
    """Factory of one template's containers."""

    runsc: RunscClient
    begin: Callable[[Path], Awaitable[GvisorContainer]]
    """Starts a container in an empty folder."""
    slots: asyncio.Semaphore
    """Slots for CPU-bound work of the host."""


class GvisorSandbox(Sandbox):
    """A container that is started at the first call."""

    def __init__(self, lease: Path, runner: Runner, making: ContainerFactory) -> None:
        """Start nothing; find the container of an earlier process.

        Raises:
            SandboxError: it has ended.
        """
        self._lease, self._folder = lease, lease / FOLDER
        self._runner, self._factory = runner, making
        self._notes = FolderNotes(lease / notes.FOLDER)
        self._jobs: GuestJobs | None = None
        self._begun: SandboxStart | None = None
        self._generation = 1
        self._container = self._find_container()

    def _find_container(self) -> GvisorContainer | None:
        name = current_container(self._lease)
        found = name and GvisorContainer.load(self._factory.runsc, self._folder / name)
        if found and found.is_lost:
            if not self._is_paused:
                raise SandboxError(f"the container of lease {self._lease.name} has ended")
            return None
        if found:
            # Left by an interrupted pause or resume: the running container is newer.
            checkpoints.remove(self._folder / PAUSED)
        return found or None

    @property
    def _is_paused(self) -> bool:
        """True if the checkpoint on disk is of the lease's present container."""
        try:
            return (self._folder / PAUSED / OF).read_text() == current_container(self._lease)
        except FileNotFoundError:
            return False

    @property
    @override
    def workspace(self) -> Workspace:  # type: ignore[override] # read only, and once there is one
        container = self._running
        if self._jobs is None or self._jobs.channel is not container:
            self._jobs = GuestJobs(channel=container, has_others=lambda: container.has_jobs)
        return GuestWorkspace(container, self._runner, notes=self._notes, jobs=self._jobs)

    @property
    @override
    def is_started(self) -> bool:
        return bool(current_container(self._lease)) or (self._folder / PAUSED).exists()

    @property
    @override
    def sandbox_start(self) -> SandboxStart | None:
        return self._begun

    @property
    @override
    def is_intact(self) -> bool:
        return self._container is None or not self._container.is_lost

    @override
    async def initialize(self, tree: Tree) -> None:
        asked_s = time.monotonic()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        container = await self._factory.begin(self._new_folder())
        try:
            await write_tree(container, tree, root=HOME)
        except BaseException:
            await container.destroy()
            raise
        await self._become(container)
        self._begun = SandboxStart(StartKind.SPAWN, time.monotonic() - asked_s)

    @override
    async def run(self, command: str, timeout_s: float) -> CommandOutcome:
        done = await GuestCommands(channel=self._running).run(command, timeout_s)
        return guest_grading.to_outcome(done)

    @override
    async def read_files(self, limits: FolderLimits) -> FolderContent:
        return await workspace_files.workspace_content(self._running, limits)

    @override
    async def start(self, program: Program) -> RunningProgram:
        return await job_programs.start_program(self.workspace.jobs, program)

    @override
    async def save(self, folder: Path, limits: FolderLimits) -> SavedSandbox:
        container = self._running
        with crossing(SandboxError, f"saving {self._folder}"):
            async with self._factory.slots:
                await container.checkpoint(folder / checkpoints.IMAGE)
            config = container.config
            return await asyncio.to_thread(checkpoints.measure, folder, config, self._lease, limits)

    @override
    async def restore(self, folder: Path, saved: SavedSandbox) -> None:
        with crossing(SandboxError, f"restoring {self._folder}"):
            await asyncio.to_thread(checkpoints.prepare, folder, self._lease, saved)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            container = await self._restored(folder)
            # From here on the snapshot is known to be good.
            await self._become(container)
            await asyncio.to_thread(checkpoints.replace_notes, self._lease)

    @override
    async def pause(self) -> None:
        container = self._container
        if container is None:
            return
        partial, paused = self._folder / "paused.partial", self._folder / PAUSED
        with crossing(SandboxError, f"pausing {self._folder}"):
            for each in (partial, paused):
                checkpoints.remove(each)
            partial.mkdir(mode=0o700)
            async with self._factory.slots:
                await container.checkpoint(partial / checkpoints.IMAGE)
            (partial / CONFIG).write_bytes(container.config)
            (partial / OF).write_text(container.folder.name)
            partial.rename(paused)
            self._container, self._jobs = None, None
            await container.destroy()

    @override
    async def resume(self) -> None:
        paused = self._folder / PAUSED
        if self._container is not None or not self._is_paused:
            return
        with crossing(SandboxError, f"resuming {self._folder}"):
            await self._become(await self._restored(paused))
            checkpoints.remove(paused)

    @override
    async def close(self) -> None:
        container, self._container, self._jobs = self._container, None, None
        if container is not None:
            await container.destroy()

    async def _restored(self, saved: Path) -> GvisorContainer:
        self._generation += 1
        config = (saved / CONFIG).read_bytes()
        async with self._factory.slots:
            return await GvisorContainer.restore(
                self._factory.runsc,
                self._new_folder(),
                saved / checkpoints.IMAGE,
                config=config,
                generation=self._generation,
            )

    async def _become(self, container: GvisorContainer) -> None:
        """Make this the lease's container, in place of the former one."""
        former, self._container, self._jobs = self._container, container, None
        partial = self._folder / f"{CURRENT}.partial"
        partial.write_text(container.folder.name)
        partial.rename(self._folder / CURRENT)
        if former is not None:
            await former.destroy()
            await asyncio.to_thread(shutil.rmtree, former.folder)

    def _new_folder(self) -> Path:
        folder = self._folder / secrets.token_hex(4)
        folder.mkdir(mode=0o700)
        return folder

    @property
    def _running(self) -> GvisorContainer:
        if self._container is None:
            raise SandboxError("the container of this lease has ended")
        return self._container


def current_container(lease: Path) -> str:
    """Name of the folder of a lease's container; empty if it has none."""
    try:
        return (lease / FOLDER / CURRENT).read_text()
    except FileNotFoundError:
        return ""
