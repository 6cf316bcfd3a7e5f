"""A controller's access to an environment: folder operations, and programs between the turns."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from etude.agent.workspace import FileInfo, FileKind, PathFault, WorkspaceError, relative_path
from etude.common.errors import FullError, WrongStateError
from etude.envserver.drivers.base import Sandbox
from etude.envserver.drivers.programs import Program, RunningProgram

_LIMIT_S = 60.0
_MAX_WORDS = 500
"""Characters of a program's error output that are reported."""


async def make_folder(sandbox: Sandbox, path: str) -> bool:
    """Make a folder and its parents; False if it exists already.

    Raises:
        WorkspaceError: the path cannot be used.
        WrongStateError: something else exists there.
    """
    clean = relative_path(path)
    if not clean:
        return False
    with contextlib.suppress(WorkspaceError):
        if (await sandbox.workspace.stat(clean)).kind is not FileKind.FOLDER:
            raise WrongStateError(f"{clean}: exists and is not a folder")
        return False
    await _run_program(sandbox, "mkdir", "-p", "--", f"./{clean}")
    return True


async def move_path(sandbox: Sandbox, path: str, new_path: str) -> FileInfo:
    """Give a file or folder another path.

    Raises:
        WorkspaceError: a path cannot be used.
        WrongStateError: a folder stands at the new path.
    """
    old, new = _require_below_root(path), _require_below_root(new_path)
    await sandbox.workspace.stat(old)
    with contextlib.suppress(WorkspaceError):
        if (await sandbox.workspace.stat(new)).kind is FileKind.FOLDER:
            raise WrongStateError(f"{new}: a folder exists already")
    await make_folder(sandbox, new.rpartition("/")[0])
    await _run_program(sandbox, "mv", "-f", "--", f"./{old}", f"./{new}")
    return await sandbox.workspace.stat(new)


async def remove_path(sandbox: Sandbox, path: str) -> None:
    """Remove a file, or a folder with its content.

    Raises:
        WorkspaceError: the path cannot be used.
    """
    clean = _require_below_root(path)
    await sandbox.workspace.stat(clean)
    await _run_program(sandbox, "rm", "-rf", "--", f"./{clean}")


def _require_below_root(path: str) -> str:
    clean = relative_path(path)
    if not clean:
        raise WorkspaceError(PathFault.IS_A_FOLDER, path)
    return clean


async def _run_program(sandbox: Sandbox, *argv: str) -> None:
    running = await sandbox.start(Program(argv=argv, timeout_s=_LIMIT_S))
    words = bytearray()
    try:
        running.close_input()
        async for piece in running.output():
            words += piece.data[: max(0, _MAX_WORDS - len(words))]
        ending = await running.wait()
    finally:
        await running.close()
    if ending.exit_code:
        why = words.decode("utf-8", "replace").strip() or f"exit code {ending.exit_code}"
        raise WrongStateError(why)


MAX_PROGRAMS = 16
"""Concurrent programs in one lease."""
END_S = 5.0
"""For programs that are killed; they take milliseconds."""


@dataclass(slots=True)
class ControllerPrograms:
    """The running programs of one lease."""

    _running: set[RunningProgram] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._running)

    async def start(self, begin: Callable[[], Awaitable[RunningProgram]]) -> RunningProgram:
        """Start a program.

        Raises:
            FullError: there are too many.
        """
        if len(self._running) >= MAX_PROGRAMS:
            raise FullError(f"{MAX_PROGRAMS} programs run in this lease", retry_after_s=5)
        running = await begin()
        self._running.add(running)
        return running

    async def close(self, running: RunningProgram) -> None:
        """End a program that has no reader any more."""
        await running.close()
        self._running.discard(running)

    async def end(self) -> None:
        """Kill all of them, and wait a little."""
        programs = set(self._running)
        for program in programs:
            program.kill()
        if programs:
            endings = [asyncio.ensure_future(program.wait()) for program in programs]
            await asyncio.wait(endings, timeout=END_S)
            for ending in endings:
                ending.cancel()
