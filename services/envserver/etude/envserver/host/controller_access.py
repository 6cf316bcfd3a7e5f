"""Folders made, moved and removed in a sandbox, by programs of its own."""

import contextlib

from etude.agent.workspace import FileInfo, FileKind, PathFault, WorkspaceError, relative
from etude.common.errors import WrongStateError
from etude.envserver.drivers.base import Sandbox
from etude.envserver.drivers.programs import Program

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
