"""Driver base for workspaces that are folders of the host: commands see them without a copy."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from typing_extensions import override

from etude.agent.workspace import FolderNotes, FolderWorkspace, NoJobs, notes
from etude.agent.workspace.interface import Runner
from etude.common.errors import crossing
from etude.envserver.drivers import folder_jobs, folder_snapshots, scratch_folder
from etude.envserver.drivers.base import (
    GRADE_OUTPUT_BYTES,
    CommandOutcome,
    Driver,
    DriverCapabilities,
    HalfRestoredError,
    Sandbox,
    SandboxError,
    SavedSandbox,
    StartKind,
    Verification,
)
from etude.envserver.drivers.folder_jobs import FolderJobs
from etude.envserver.drivers.piped_program import PipedProgram
from etude.envserver.drivers.programs import Program, RunningProgram
from etude.envserver.egress.environment_egress import EnvironmentEgress
from etude.envserver.isolation import sandbox_layout
from etude.envserver.isolation.output import HEAD_BYTES, TAIL_BYTES
from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderContent, FolderLimits, Owner
from etude.envserver.storage.trees import Tree

_WORKSPACE = "workspace"
CAPS = DriverCapabilities(files=True, memory=False, freeze=True)
"""Snapshots hold no memory: it belongs to processes of the host."""

Launch = Callable[[Path, Program], Awaitable[PipedProgram]]
"""Starts a program in a workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderCommand:
    """One shell command in one workspace."""

    command: str
    workspace: Path
    """Folder below the driver's leases."""
    tests: Path | None = None
    """Folder below the driver's leases, shown as /tests."""
    timeout_s: float
    head_bytes: int = HEAD_BYTES
    tail_bytes: int = TAIL_BYTES
    collect: str = ""
    """File to read back afterwards: regular, small, reached without links."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the variables of the sandbox."""


class FolderSandbox(Sandbox):
    """Sandbox of one lease as a folder."""

    def __init__(
        self,
        folder: Path,
        runner: Runner,
        execute: Callable[[FolderCommand], Awaitable[CommandOutcome]],
        owner: Owner,
        *,
        launch: Launch | None = None,
        gate: EnvironmentEgress | None = None,
    ) -> None:
        self._gate = gate
        self._launch = launch
        self._root = folder / _WORKSPACE
        self._runner = runner
        self._execute = execute
        self._owner = owner
        self._jobs = self._load_jobs()
        self.workspace = self._open_workspace()

    def _open_workspace(self) -> FolderWorkspace:
        kept = FolderNotes(self._root.with_name(notes.FOLDER))
        return FolderWorkspace(
            self._root,
            self._runner,
            owner=self._owner,
            notes=kept,
            jobs=self._jobs or NoJobs(),
        )

    def _load_jobs(self) -> FolderJobs | None:
        if self._launch is None:
            return None
        folder = self._root.with_name(folder_jobs.FOLDER)
        return FolderJobs(folder, partial(self._launch, self._root))

    @property
    @override
    def is_started(self) -> bool:
        return self._root.exists()

    @override
    async def initialize(self, tree: Tree) -> None:
        await asyncio.to_thread(self._write, tree)

    def _write(self, tree: Tree) -> None:
        partial = self._root.with_name(f"{_WORKSPACE}.partial")
        if partial.exists():
            folders.remove_folder(partial)
        folders.write_tree(partial, tree, self._owner)
        partial.rename(self._root)

    @override
    async def run(self, command: str, timeout_s: float) -> CommandOutcome:
        return await self._execute(
            FolderCommand(command=command, workspace=self._root, timeout_s=timeout_s)
        )

    @override
    async def read_files(self, limits: FolderLimits) -> FolderContent:
        if limits == folders.SMALL:
            return folders.read_tree(self._root, limits)  # a thread would cost more than the read
        return await asyncio.to_thread(folders.read_tree, self._root, limits)

    @override
    async def save(self, folder: Path, limits: FolderLimits) -> SavedSandbox:
        with crossing(SandboxError, f"saving {self._root}"):
            lease = self._root.parent
            return await asyncio.to_thread(
                folder_snapshots.save, lease, self._parts(), folder, limits
            )

    @override
    async def restore(self, folder: Path, saved: SavedSandbox) -> None:
        lease, parts = self._root.parent, self._parts()
        with crossing(SandboxError, f"restoring {self._root}"):
            await asyncio.to_thread(folder_snapshots.prepare, folder, parts, lease, saved)
            # From here on the snapshot is known to be good.
            await self.close()
            with crossing(HalfRestoredError, f"restoring {self._root}"):
                await asyncio.to_thread(folder_snapshots.replace, parts, lease)
        # Known files and jobs have changed.
        self._jobs = self._load_jobs()
        if self._jobs is not None:
            self._jobs.end_lost()
        self.workspace = self._open_workspace()

    def _parts(self) -> folder_snapshots.FolderOwners:
        ours = folders.current_owner()
        return {_WORKSPACE: self._owner, notes.FOLDER: ours, folder_jobs.FOLDER: ours}

    @override
    async def pause(self) -> None:
        await self.close()
        if self._jobs is not None:
            self._jobs.end_lost()

    @override
    async def resume(self) -> None:
        return None

    @override
    async def start(self, program: Program) -> RunningProgram:
        if self._launch is None:
            return await super().start(program)
        return await self._launch(self._root, program)

    @property
    @override
    def is_intact(self) -> bool:
        return self._jobs is None or self._jobs.is_intact

    @override
    async def close(self) -> None:
        if self._jobs is not None:
            await self._jobs.close()


class FolderDriver(Driver, ABC):
    """Driver that executes commands in folders of the host."""

    __slots__ = ()
    caps: DriverCapabilities = CAPS
    start_kind: StartKind | None = StartKind.COPY

    @abstractmethod
    def owner(self) -> Owner:
        """Owner of a workspace's files."""

    @abstractmethod
    async def run(self, command: FolderCommand) -> CommandOutcome:
        """Run a command behind the isolation boundary."""

    @override
    def sandbox(self, folder: Path, runner: Runner, *, template: str) -> Sandbox:
        return FolderSandbox(folder, runner, self.run, self.owner())

    @override
    async def verify(self, work: Verification) -> CommandOutcome:
        async with scratch_folder.grading_folder(self.leases) as folder:
            workspace, tests = folder / _WORKSPACE, folder / "tests"
            await asyncio.to_thread(folders.write_tree, workspace, work.workspace, self.owner())
            await asyncio.to_thread(folders.write_tree, tests, work.tests, self.owner())
            return await self.run(
                FolderCommand(
                    command=work.command,
                    workspace=workspace,
                    tests=tests,
                    timeout_s=work.timeout_s,
                    head_bytes=0,
                    tail_bytes=GRADE_OUTPUT_BYTES,
                    collect=work.reward_path,
                    environment=work.environment,
                )
            )

    @override
    def repeatable_key(self, command: str) -> str:
        return command.strip() if sandbox_layout.parse_warm_command(command) else ""
