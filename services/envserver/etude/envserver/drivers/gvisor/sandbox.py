"""Sandbox of one lease as a gVisor container.

lease/gvisor/current        name of the container's folder, written once it runs
            /<name>/        a container: its bundle, its pipes, its record
            /paused/        a checkpoint, while the lease is suspended to disk
"""

import asyncio
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace.interface import HOME, Runner
from etude.common import atomic
from etude.common.errors import crossing
from etude.envserver.drivers import folder_snapshots, job_programs
from etude.envserver.drivers.base import SandboxError, SandboxStart, SavedSandbox, StartKind
from etude.envserver.drivers.guest_sandbox import GuestSandbox
from etude.envserver.drivers.gvisor import checkpoints
from etude.envserver.drivers.gvisor.container import CONFIG, GvisorContainer
from etude.envserver.drivers.gvisor.runsc import RunscClient
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.isolation import sandbox_layout
from etude.envserver.storage.folders import FolderLimits
from etude.envserver.storage.trees import Tree
from etude.v1 import guest_pb2

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
    image_environment: Mapping[str, str]
    """Variables that its image says."""
    limits: guest_pb2.GuestLimits
    """Limits of each command."""


class GvisorSandbox(GuestSandbox[GvisorContainer]):
    """A container that is started at the first call."""

    guest_word = "container"

    def __init__(self, lease: Path, runner: Runner, factory: ContainerFactory) -> None:
        super().__init__(lease, runner, None, factory.limits)
        self._folder, self._factory = lease / FOLDER, factory
        self._generation = 1
        self._guest = self._find_container()

    @property
    @override
    def _environment(self) -> Mapping[str, str]:
        return sandbox_layout.command_environment(self._factory.image_environment)

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
    def is_started(self) -> bool:
        return bool(current_container(self._lease)) or (self._folder / PAUSED).exists()

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
        await self._replace_container(container)
        self._start = SandboxStart(StartKind.SPAWN, time.monotonic() - asked_s)

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
            container = await self._restore_container(folder)
            # From here on the snapshot is known to be good.
            await self._replace_container(container)
            await asyncio.to_thread(folder_snapshots.replace_notes, self._lease)

    @override
    async def pause(self) -> None:
        container = self._guest
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
            self._guest, self._jobs = None, None
            await container.destroy()

    @override
    async def resume(self) -> None:
        paused = self._folder / PAUSED
        if self._guest is not None or not self._is_paused:
            return
        with crossing(SandboxError, f"resuming {self._folder}"):
            await self._replace_container(await self._restore_container(paused))
            checkpoints.remove(paused)

    async def _restore_container(self, saved: Path) -> GvisorContainer:
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

    async def _replace_container(self, container: GvisorContainer) -> None:
        """Make this the lease's container, in place of the former one."""
        former, self._guest, self._jobs = self._guest, container, None
        atomic.write_text(self._folder / CURRENT, container.folder.name)
        if former is not None:
            await former.destroy()
            await asyncio.to_thread(shutil.rmtree, former.folder)

    def _new_folder(self) -> Path:
        folder = self._folder / secrets.token_hex(4)
        folder.mkdir(mode=0o700)
        return folder


def current_container(lease: Path) -> str:
    """Name of the folder of a lease's container; empty if it has none."""
    try:
        return (lease / FOLDER / CURRENT).read_text()
    except FileNotFoundError:
        return ""
