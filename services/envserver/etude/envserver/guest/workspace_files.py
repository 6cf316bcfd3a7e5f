"""Files of a guest's workspace as a value: written, read back, compared with a mark."""

import asyncio
from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from etude.envserver.guest import replies
from etude.envserver.guest.calls import GuestCaller, GuestReply, GuestRequest, ReplyTooLargeError
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.storage.archives import pack_archive
from etude.envserver.storage.folders import FolderContent, FolderLimits, TooLargeError
from etude.envserver.storage.trees import File, Tree
from etude.v1 import environments_pb2, guest_pb2

_DEADLINE_S = 120.0
"""64 MiB through an emulated port."""
_NAME_BYTES = 8
"""What the message adds to a name."""
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


async def workspace_change(
    channel: GuestCaller, base: bytes, limits: FolderLimits
) -> environments_pb2.WorkspaceDiff:
    """Changes since the files of a base: its own ones, and new ones that no .gitignore names.

    Args:
        channel: to the guest, which reads only files that were written.
        base: as encoded by `encode_base`.
        limits: on the change alone.

    Raises:
        TooLargeError: it is larger, or takes too long to be found.
        WorkspaceLostError: the guest failed.
    """
    change = guest_pb2.GuestChange(max_files=limits.max_files, max_bytes=limits.max_bytes)
    request = GuestRequest(
        operation=guest_pb2.GuestCall(change=change),
        data=base,
        deadline_s=_DEADLINE_S,
        max_bytes=limits.max_bytes + limits.max_files * _PER_FILE_BYTES,
    )
    too_large = f"the change has more than {limits.max_files} files or {limits.max_bytes} bytes"
    try:
        reply = await channel.call(request)
    except ReplyTooLargeError as error:
        raise TooLargeError(too_large) from error
    if reply.result.fault == guest_pb2.GUEST_FAULT_TOO_MANY:
        raise TooLargeError(too_large)
    # The guest is well: its folders hold more than it can look at in time.
    if reply.result.status == guest_pb2.GUEST_STATUS_TIMEOUT:
        raise TooLargeError(f"the change was not found in {_DEADLINE_S:.0f} s")
    return _decoded(replies.require_reply(reply, ""))


_DELETED_BYTES = 128 << 10
"""Names in one call: a guest takes no longer ones."""


async def write_tree(
    channel: GuestCaller,
    tree: Tree,
    *,
    root: str,
    uid: int | None = None,
    deleted: Iterable[str] = (),
) -> None:
    """Write the files of a tree below a folder of the guest, as one archive; not atomic.

    Args:
        channel: to the guest.
        tree: by path below the folder. What is in the way of a file is replaced.
        root: absolute, and there.
        uid: owner of the files; None is the sandbox's user.
        deleted: files to remove first, with the folders that are empty then.

    Raises:
        WorkspaceLostError: the guest failed, or has no room for it.
    """
    for names in _in_parts(deleted):
        apply = guest_pb2.GuestApply(deleted=names)
        await _apply(channel, guest_pb2.GuestCall(apply=apply, cwd=root, uid=uid), None)
    if tree:
        apply = guest_pb2.GuestApply(has_archive=True)
        call = guest_pb2.GuestCall(apply=apply, cwd=root, uid=uid)
        await _apply(channel, call, await asyncio.to_thread(pack_archive, tree))


def _in_parts(paths: Iterable[str]) -> Iterator[list[str]]:
    part: list[str] = []
    size = 0
    for path in paths:
        size += len(path.encode()) + _NAME_BYTES
        if size > _DELETED_BYTES:
            yield part
            part, size = [], len(path.encode()) + _NAME_BYTES
        part.append(path)
    if part:
        yield part


async def _apply(channel: GuestCaller, call: guest_pb2.GuestCall, data: bytes | None) -> None:
    request = GuestRequest(operation=call, data=data, deadline_s=_DEADLINE_S)
    replies.require_reply(await channel.call(request), "archive")
