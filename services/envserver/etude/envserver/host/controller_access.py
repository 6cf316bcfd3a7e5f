"""Folders made, moved and removed in a sandbox, by programs of its own."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from etude.agent.workspace import FileInfo, FileKind, PathFault, WorkspaceError, relative
from etude.common.errors import FullError, WrongStateError
from etude.envserver.drivers.base import Sandbox
from etude.envserver.drivers.programs import Program, RunningProgram

_LIMIT_S = 60.0
_MAX_WORDS = 500
"""Of what a program says about its failure."""


async def make_folder(sandbox: Sandbox, path: str) -> bool:
    """Make a folder and those above it; False if it is there already.

    Raises:
        WorkspaceError: the path cannot be used.
        WrongStateError: something else is there.
    """
    clean = relative(path)
    if not clean:
        return False
    with contextlib.suppress(WorkspaceError):
        if (await sandbox.workspace.stat(clean)).kind is not FileKind.FOLDER:
            raise WrongStateError(f"{clean}: is there and is no folder")
        return False
    await _do(sandbox, "mkdir", "-p", "--", f"./{clean}")
    return True


async def move(sandbox: Sandbox, path: str, new_path: str) -> FileInfo:
    """Give a file or folder another path.

    Raises:
        WorkspaceError: a path cannot be used.
        WrongStateError: a folder stands at the new path.
    """
    old, new = _inside(path), _inside(new_path)
    await sandbox.workspace.stat(old)
    with contextlib.suppress(WorkspaceError):
        if (await sandbox.workspace.stat(new)).kind is FileKind.FOLDER:
            raise WrongStateError(f"{new}: a folder is there already")
    await make_folder(sandbox, new.rpartition("/")[0])
    await _do(sandbox, "mv", "-f", "--", f"./{old}", f"./{new}")
    return await sandbox.workspace.stat(new)


async def remove(sandbox: Sandbox, path: str) -> None:
    """End a file, or a folder with all in it.

    Raises:
        WorkspaceError: the path cannot be used.
    """
    clean = _inside(path)
    await sandbox.workspace.stat(clean)
    await _do(sandbox, "rm", "-rf", "--", f"./{clean}")


def _inside(path: str) -> str:
    clean = relative(path)
    if not clean:
        raise WorkspaceError(PathFault.IS_A_FOLDER, path)
    return clean


async def _do(sandbox: Sandbox, *argv: str) -> None:
    running = await sandbox.start(Program(argv=argv, timeout_s=_LIMIT_S))
    words = bytearray()
    try:
        running.close_input()
        async for piece in running.output():
            words += piece.data[: max(0, _MAX_WORDS - len(words))]
        ending = await running.ending()
    finally:
        await running.close()
    if ending.exit_code:
        why = words.decode("utf-8", "replace").strip() or f"exit code {ending.exit_code}"
        raise WrongStateError(why)


MAX_PROGRAMS = 16
"""At a time, in one lease."""
END_S = 5.0
"""For programs that are killed; they take milliseconds."""


@dataclass(slots=True)
class Programs:
    """Those of one lease that run."""

    _running: set[RunningProgram] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._running)

    async def start(self, begin: Callable[[], Awaitable[RunningProgram]]) -> RunningProgram:
        """One more.

        Raises:
            FullError: there are too many.
        """
        if len(self._running) >= MAX_PROGRAMS:
            raise FullError(f"{MAX_PROGRAMS} programs run in this lease", retry_after_s=5)
        running = await begin()
        self._running.add(running)
        return running

    async def close(self, running: RunningProgram) -> None:
        """Nobody listens to it any more."""
        await running.close()
        self._running.discard(running)

    async def end(self) -> None:
        """Kill all of them, and wait a little."""
        programs = set(self._running)
        for program in programs:
            program.kill()
        if programs:
            endings = [asyncio.ensure_future(program.ending()) for program in programs]
            await asyncio.wait(endings, timeout=END_S)
            for ending in endings:
                ending.cancel()
