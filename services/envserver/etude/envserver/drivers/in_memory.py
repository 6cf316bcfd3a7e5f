"""In-memory driver without isolation, for tests of the layers above."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from etude.agent import minitest
from etude.envserver.drivers.base import CommandOutcome, DriverCapabilities, IsolationStrength
from etude.envserver.drivers.folder_driver import CAPS, FolderCommand, FolderDriver
from etude.envserver.isolation.sandbox_layout import parse_warm_command
from etude.envserver.storage.folders import Owner, current_owner


def run_tests(command: FolderCommand) -> CommandOutcome:
    """Answer `pytest -q` with the result of the workspace's own tests, in this process."""
    way = parse_warm_command(command.command)
    if way is None or way.file is not None:
        return CommandOutcome(output=b"sh: not found\n", exit_code=127)
    paths = (path for path in command.workspace.rglob("*.py") if path.is_file())
    files = {str(path.relative_to(command.workspace)): path.read_bytes() for path in paths}
    verdict = minitest.run(files)
    return CommandOutcome(output=verdict.output.encode(), exit_code=verdict.exit_code)


@dataclass(slots=True)
class MemoryDriver(FolderDriver):
    """Answers commands by a function, and records them."""

    leases: Path
    answer: Callable[[FolderCommand], CommandOutcome] = run_tests
    name: str = "memory"
    strength: IsolationStrength = IsolationStrength.WEAK
    caps: DriverCapabilities = CAPS
    commands: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None
    """Commands wait for this event."""
    command_started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by each command."""

    @override
    def owner(self) -> Owner:
        return current_owner()

    @override
    async def start(self) -> None:
        self.leases.mkdir(parents=True, exist_ok=True)

    @override
    async def run(self, command: FolderCommand) -> CommandOutcome:
        self.commands.append(command.command)
        self.command_started.set()
        if self.gate is not None:
            await self.gate.wait()
        return self.answer(command)

    @override
    async def stop(self) -> None:
        return None
