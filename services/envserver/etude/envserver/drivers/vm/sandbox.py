"""Sandbox of one lease as a microVM."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace.interface import HOME, Runner
from etude.common.errors import crossing
from etude.envserver.drivers import folder_snapshots, guest_grading, job_programs
from etude.envserver.drivers.base import (
    CommandOutcome,
    HalfRestoredError,
    SandboxError,
    SavedSandbox,
    Verification,
)
from etude.envserver.drivers.guest_sandbox import GuestSandbox
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.drivers.vm.suspend import snapshots
from etude.envserver.drivers.vm.suspend.auto_suspend import AutoSuspendingVm
from etude.envserver.drivers.vm.suspend.idle_policy import TRANSITIONAL
from etude.envserver.drivers.vm.suspend.lease_vm import VmContext, suspended_file
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER
from etude.envserver.egress import proxy_variables
from etude.envserver.guest.commands import CommandSettings
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace_files import write_tree
from etude.envserver.isolation import sandbox_layout
from etude.envserver.storage.folders import FolderLimits
from etude.envserver.storage.trees import Tree


class VmSandbox(GuestSandbox[AutoSuspendingVm]):
    """A microVM that is started at the first call."""

    guest_word = "VM"

    def __init__(
        self, lease: Path, runner: Runner, context: VmContext, guest: AutoSuspendingVm | None = None
    ) -> None:
        super().__init__(lease, runner, guest, context.limits)
        self._folder, self._context = lease / VM_FOLDER, context

    @property
    @override
    def is_started(self) -> bool:
        return self._folder.exists() or suspended_file(self._lease) is not None

    @override
    async def initialize(self, tree: Tree) -> None:
        self._folder.mkdir(mode=0o700)
        guest, start = await self._context.launch(self._folder)
        try:
            await write_tree(guest, tree, root=HOME)
            async with guest.keep_running():
                await guest.vm.record_use()
        except BaseException:
            await guest.destroy()
            raise
        self._guest, self._start = guest, start

    @override
    async def verify(self, work: Verification) -> CommandOutcome:
        self._running.vm.close_egress()
        environment = sandbox_layout.command_environment(self._context.image_environment)
        how = CommandSettings(environment, self._limits)
        return await guest_grading.grade_fork(self._running, work, how)

    @override
    async def verify_prepared(self, work: Verification) -> CommandOutcome:
        self._running.vm.close_egress()
        environment = sandbox_layout.command_environment(self._context.image_environment)
        how = CommandSettings(environment, self._limits)
        return await guest_grading.grade_fresh(self._running, work, how)

    @override
    async def save(self, folder: Path, limits: FolderLimits) -> SavedSandbox:
        with crossing(SandboxError, f"saving {self._folder}"):
            return await snapshots.save(self._running, self._lease, folder, limits)

    @override
    async def restore(self, folder: Path, saved: SavedSandbox) -> None:
        lease, context = self._lease, self._context
        with crossing(SandboxError, f"restoring {self._folder}"):
            check = (folder, saved, context.suspend_store, context.starter().template.address)
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
                    await asyncio.to_thread(folder_snapshots.replace_notes, lease)
            finally:
                self._guest = context.find(None)

    @override
    async def start(self, program: Program) -> RunningProgram:
        jobs = GuestJobs(
            channel=self._running,
            environment=self._environment,
            limits=self._limits,
            is_controllers=True,
        )
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

    @property
    @override
    def _environment(self) -> Mapping[str, str]:
        egress = proxy_variables.VARIABLES if self._context.gate is not None else {}
        return {**sandbox_layout.command_environment(self._context.image_environment), **egress}
