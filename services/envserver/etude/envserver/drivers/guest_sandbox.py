"""Sandboxes with a guest agent: the half that microVMs and gVisor containers share."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from typing_extensions import override

from etude.agent.workspace import FolderNotes, Workspace, notes
from etude.agent.workspace.interface import Runner
from etude.envserver.drivers import guest_grading
from etude.envserver.drivers.base import (
    CommandOutcome,
    Sandbox,
    SandboxError,
    SandboxStart,
    Verification,
)
from etude.envserver.guest import workspace_files
from etude.envserver.guest.calls import GuestCaller
from etude.envserver.guest.commands import CommandSettings, GuestCommands
from etude.envserver.guest.jobs import GuestJobs
from etude.envserver.guest.workspace import GuestWorkspace
from etude.envserver.isolation import sandbox_layout
from etude.envserver.storage.folders import FolderContent, FolderLimits
from etude.v1 import environments_pb2, guest_pb2


class SandboxGuest(GuestCaller, Protocol):
    """A VM or container with an agent."""

    @property
    @abstractmethod
    def has_jobs(self) -> bool:
        """True if background jobs may run in it."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """True if it has ended or no longer answers."""

    async def destroy(self) -> None:
        """End it; safe to repeat."""


_G = TypeVar("_G", bound=SandboxGuest)


class GuestSandbox(Sandbox, Generic[_G]):
    """A sandbox whose guest is started at the first call."""

    guest_word: ClassVar[str]
    """Its guest's word in errors."""

    def __init__(
        self, lease: Path, runner: Runner, guest: _G | None, limits: guest_pb2.GuestLimits
    ) -> None:
        self._lease, self._runner, self._guest = lease, runner, guest
        self._limits = limits
        self._notes = FolderNotes(lease / notes.FOLDER)
        self._jobs: GuestJobs | None = None
        self._start: SandboxStart | None = None

    @property
    @override
    def workspace(self) -> Workspace:  # type: ignore[override] # read only, and once there is one
        guest = self._running
        if self._jobs is None or self._jobs.channel is not guest:
            self._jobs = GuestJobs(
                channel=guest,
                environment=self._environment,
                limits=self._limits,
                has_others=lambda: guest.has_jobs,
            )
        return GuestWorkspace(guest, self._runner, notes=self._notes, jobs=self._jobs)

    @property
    @override
    def sandbox_start(self) -> SandboxStart | None:
        return self._start

    @property
    @override
    def is_intact(self) -> bool:
        return self._guest is None or not self._guest.is_lost

    @override
    async def run(self, command: str, timeout_s: float) -> CommandOutcome:
        commands = GuestCommands(
            channel=self._running, environment=self._environment, limits=self._limits
        )
        return guest_grading.to_outcome(await commands.run(command, timeout_s))

    @override
    async def read_files(self, limits: FolderLimits) -> FolderContent:
        return await workspace_files.workspace_content(self._running, limits)

    @override
    async def verify_prepared(self, work: Verification) -> CommandOutcome:
        how = CommandSettings(self._environment, self._limits)
        return await guest_grading.grade_fresh(self._running, work, how)

    @override
    async def read_change(
        self, base: bytes, limits: FolderLimits
    ) -> environments_pb2.WorkspaceDiff:
        return await workspace_files.workspace_change(self._running, base, limits)

    @override
    async def close(self) -> None:
        guest, self._guest, self._jobs = self._guest, None, None
        if guest is not None:
            await guest.destroy()

    @property
    def _environment(self) -> Mapping[str, str]:
        return sandbox_layout.ENVIRONMENT

    @property
    def _running(self) -> _G:
        if self._guest is None:
            raise SandboxError(f"the {self.guest_word} of this lease has ended")
        return self._guest
