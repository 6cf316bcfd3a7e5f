"""Trees of files put into a guest."""

import asyncio
import hashlib

from etude.envserver.guest import answers
from etude.envserver.guest.calls import Caller, Request
from etude.envserver.trees import File, Tree
from etude.v1 import guest_pb2

_DEADLINE_S = 60.0


async def place(channel: Caller, tree: Tree, *, root: str) -> None:
    """Write every file of a tree below a folder of the guest; all of them or none is the caller's.

    Args:
        channel: to the guest.
        tree: by path below the folder.
        root: absolute, and there.

    Raises:
        WorkspaceError: a path is no possible one there.
        WorkspaceLostError: the guest failed.
    """
    async with asyncio.TaskGroup() as group:
        for path, file in tree.items():
            group.create_task(_write(channel, root, path, file), name=f"place {path[:80]}")


async def _write(channel: Caller, root: str, path: str, file: File) -> None:
    write = guest_pb2.GuestWrite(
        path=path,
        size=len(file.content),
        sha256=hashlib.sha256(file.content).digest(),
        mode=0o755 if file.executable else 0o644,
    )
    call = guest_pb2.GuestCall(write=write, cwd=root)
    reply = await channel.call(Request(operation=call, data=file.content, deadline_s=_DEADLINE_S))
    answers.check(reply, path)
