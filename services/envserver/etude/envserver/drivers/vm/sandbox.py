"""Sandbox of one lease as a microVM."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace import FolderNotes, Workspace, notes
from etude.agent.workspace.interface import HOME, Runner
from etude.common.errors import crossing
from etude.envserver.drivers import guest_grading, job_programs
from etude.envserver.drivers.base import (
    CommandOutcome,
    HalfRestoredError,
    Sandbox,
    SandboxError,
    SandboxStart,
    SavedSandbox,
    Verification,
)
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.drivers.vm.suspend import snapshots
from etude.envserver.drivers.vm.suspend.auto_suspend import AutoSuspendingVm
from etude.envserver.drivers.vm.suspend.idle_policy import TRANSITIONAL
from etude.envserver.drivers.vm.suspend.lease_vm import VmContext, suspended_file
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER
from etude.envserver.egress import proxy_variables
from etude.envserver.guest import workspace_files
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.isolation import sandbox_layout
from etude.envserver.storage.folders import FolderContent, FolderLimits
from etude.envserver.storage.trees import Tree


class VmSandbox(Sandbox):
    """A microVM that is started at the first call."""

    def __init__(
        self, folder: Path, runner: Runner, home: VmContext, guest: AutoSuspendingVm | None = None
    ) -> None:
        """Nothing is started.

        Args:
            folder: the lease folder.
            runner: runs the workspace's commands.
            home: starts the VM.
            guest: the VM, if an earlier process started it.
        """
        self._folder = folder / VM_FOLDER
        self._runner = runner
        self._context = home
        self._guest = guest
        self._notes = FolderNotes(folder / notes.FOLDER)
        self._jobs: GuestJobs | None = None
        self._begun: SandboxStart | None = None

    @property
    @override
    def workspace(self) -> Workspace:  # type: ignore[override] # read only, and once there is one
        guest = self._running
        if self._jobs is None or self._jobs.channel is not guest:
            self._jobs = GuestJobs(
                channel=guest,
                environment=self._environment,
                has_others=lambda: guest.has_jobs,
            )
        return GuestWorkspace(
            guest,
            self._runner,
            notes=self._notes,
            jobs=self._jobs,
        )

    @property
    @override
    def is_started(self) -> bool:
        return self._folder.exists() or suspended_file(self._folder.parent) is not None

    @property
    @override
    def sandbox_start(self) -> SandboxStart | None:
        return self._begun

    @property
    @override
    def is_intact(self) -> bool:
        return self._guest is None or not self._guest.is_lost

    @override
    async def initialize(self, tree: Tree) -> None:
        self._folder.mkdir(mode=0o700)
        guest, begun = await self._context.launch(self._folder)
        try:
            await write_tree(guest, tree, root=HOME)
            async with guest.keep_running():
                await guest.vm.record_use()
        except BaseException:
            await guest.destroy()
            raise
        self._guest, self._begun = guest, begun

    @override
    async def run(self, command: str, timeout_s: float) -> CommandOutcome:
        commands = GuestCommands(channel=self._running, environment=self._environment)
        return guest_grading.to_outcome(await commands.run(command, timeout_s))

    @override
    async def read_files(self, limits: FolderLimits) -> FolderContent:
        return await workspace_files.workspace_content(self._running, limits)

    @override
    async def verify(self, work: Verification) -> CommandOutcome:
        self._running.vm.close_egress()
        return await guest_grading.grade_fork(self._running, work)

    @override
    async def save(self, folder: Path, limits: FolderLimits) -> SavedSandbox:
        with crossing(SandboxError, f"saving {self._folder}"):
            return await snapshots.save(self._running, self._folder.parent, folder, limits)

    @override
    async def restore(self, folder: Path, saved: SavedSandbox) -> None:
        lease, home = self._folder.parent, self._context
        with crossing(SandboxError, f"restoring {self._folder}"):
            check = (folder, saved, home.suspend_store, home.starter().template.address)
            await asyncio.to_thread(snapshots.check, *check)
            await asyncio.to_thread(snapshots.prepare, folder, saved, lease)
            guest = self._guest
            if guest is not None and guest.state in TRANSITIONAL:
                async with guest.keep_running():  # after this it writes no file by itself
                    pass
            # The suspended state on disk is the VM from here on.
            snapshots.activate(lease, 0 if guest is None else guest.vm.generation)
            try:
                await self.close()
                with crossing(HalfRestoredError, f"restoring {self._folder}"):
                    await asyncio.to_thread(snapshots.replace_notes, lease)
            finally:
                self._guest = home.find(None)
                # Known files and commands have changed.
                self._jobs = None

    @override
    async def start(self, program: Program) -> RunningProgram:
        jobs = GuestJobs(channel=self._running, environment=self._environment, is_controllers=True)
        return await job_programs.start_program(jobs, program)

    @override
    async def pause(self) -> None:
        if self._guest is not None:
            await self._guest.suspend()

    @override
    async def resume(self) -> None:
        if self._guest is not None:
            async with self._guest.keep_running():
                return

    @override
    async def close(self) -> None:
        guest, self._guest = self._guest, None
        if guest is not None:
            await guest.destroy()

    @property
    def _environment(self) -> Mapping[str, str]:
        egress = proxy_variables.VARIABLES if self._context.gate is not None else {}
        return {**sandbox_layout.ENVIRONMENT, **egress}

    @property
    def _running(self) -> AutoSuspendingVm:
        if self._guest is None:
            raise SandboxError("the VM of this lease has ended")
        return self._guest
