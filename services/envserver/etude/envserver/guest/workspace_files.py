"""Files of a guest's workspace as a value: written, read back, compared with a mark."""

import asyncio
import hashlib

from google.protobuf.message import DecodeError

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.guest import replies
from etude.envserver.guest.calls import GuestCaller, GuestReply, GuestRequest, ReplyTooLargeError
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.storage.folders import FolderContent, FolderLimits, TooLargeError
from etude.envserver.storage.trees import File, Tree
from etude.v1 import environments_pb2, guest_pb2

_DEADLINE_S = 120.0
"""64 MiB through an emulated port."""
_PER_FILE_BYTES = 2048
"""A path, and the overhead of a message for a file."""


async def mark_workspace(channel: GuestCaller, name: str) -> None:
    """Record the present files, for later comparison.

    Raises:
        WorkspaceLostError: the guest failed.
    """
    call = guest_pb2.GuestCall(mark=guest_pb2.GuestMark(name=name))
    replies.require_reply(
        await channel.call(GuestRequest(operation=call, deadline_s=_DEADLINE_S)), ""
    )


async def changed_files(
    channel: GuestCaller, name: str, limits: FolderLimits
) -> environments_pb2.WorkspaceDiff:
    """Changes since the mark, in the order of the paths.

    Raises:
        TooLargeError: there is more than the limits allow.
        WorkspaceLostError: the guest failed.
    """
    diff = _decoded(await _diff(channel, name, limits))
    ordered = environments_pb2.WorkspaceDiff(deleted=sorted(diff.deleted))
    ordered.written.extend(sorted(diff.written, key=lambda file: file.path))
    return ordered


async def workspace_content(channel: GuestCaller, limits: FolderLimits) -> FolderContent:
    """Read all regular files.

    Raises:
        TooLargeError: there is more than the limits allow.
        WorkspaceLostError: the guest failed.
    """
    reply = await _diff(channel, "", limits)
    files = _decoded(reply).written
    tree = {file.path: File(file.content, file.executable) for file in files}
    return FolderContent(tree, reply.result.is_plain)


async def _diff(channel: GuestCaller, name: str, limits: FolderLimits) -> GuestReply:
    diff = guest_pb2.GuestDiff(mark=name, max_files=limits.max_files, max_bytes=limits.max_bytes)
    request = GuestRequest(
        operation=guest_pb2.GuestCall(diff=diff),
        deadline_s=_DEADLINE_S,
        max_bytes=limits.max_bytes + limits.max_files * _PER_FILE_BYTES,
    )
    too_large = (
        f"the workspace holds more than {limits.max_files} files or {limits.max_bytes} bytes"
    )
    try:
        reply = await channel.call(request)
    except ReplyTooLargeError as error:
        raise TooLargeError(too_large) from error
    if reply.result.fault == guest_pb2.GUEST_FAULT_TOO_MANY:
        raise TooLargeError(too_large)
    return replies.require_reply(reply, "")


def _decoded(reply: GuestReply) -> environments_pb2.WorkspaceDiff:
    try:
        return environments_pb2.WorkspaceDiff.FromString(reply.data.get(0, b""))
    except DecodeError as error:
        raise GuestLostError("the guest sent no WorkspaceDiff") from error


_PLACE_DEADLINE_S = 60.0


async def write_tree(
    channel: GuestCaller, tree: Tree, *, root: str, uid: int | None = None
) -> None:
    """Write every file of a tree below a folder of the guest; not atomic.

    Args:
        channel: to the guest.
        tree: by path below the folder.
        root: absolute, and there.
        uid: owner of the files; None is the sandbox's user.

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
        # One is enough: its text is the client's.
        raise errors.exceptions[0] from None


def _write(path: str, file: File) -> guest_pb2.GuestWrite:
    return guest_pb2.GuestWrite(
        path=path,
        size=len(file.content),
        sha256=hashlib.sha256(file.content).digest(),
        mode=0o755 if file.executable else 0o644,
    )


async def _ask(channel: GuestCaller, call: guest_pb2.GuestCall, file: File) -> None:
    reply = await channel.call(
        GuestRequest(operation=call, data=file.content, deadline_s=_PLACE_DEADLINE_S)
    )
    replies.require_reply(reply, call.write.path)
