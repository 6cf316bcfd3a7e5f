"""Trees of files put into a guest."""

import asyncio
import hashlib

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.guest import answers
from etude.envserver.guest.calls import Caller, Request
from etude.envserver.trees import File, Tree
from etude.v1 import guest_pb2

_DEADLINE_S = 60.0


async def place(channel: Caller, tree: Tree, *, root: str, uid: int | None = None) -> None:
    """Write every file of a tree below a folder of the guest; all of them or none is the caller's.

    Args:
        channel: to the guest.
        tree: by path below the folder.
        root: absolute, and there.
        uid: whose they are; None is the sandbox's user.

    Raises:
        WorkspaceLostError: the guest failed, or has no room for one of them.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for path, file in tree.items():
                call = guest_pb2.GuestCall(write=_write(path, file), cwd=root, uid=uid)
                group.create_task(_ask(channel, call, file), name=f"place {path[:80]}")
    except ExceptionGroup as errors:
        others = errors.split(WorkspaceLostError)[1]
        if others is not None:
            raise
        # One is enough, and what it says is what a client is told.
        raise errors.exceptions[0] from None


def _write(path: str, file: File) -> guest_pb2.GuestWrite:
    return guest_pb2.GuestWrite(
        path=path,
        size=len(file.content),
        sha256=hashlib.sha256(file.content).digest(),
        mode=0o755 if file.executable else 0o644,
    )


async def _ask(channel: Caller, call: guest_pb2.GuestCall, file: File) -> None:
    reply = await channel.call(Request(operation=call, data=file.content, deadline_s=_DEADLINE_S))
    answers.sure(reply, call.write.path)
