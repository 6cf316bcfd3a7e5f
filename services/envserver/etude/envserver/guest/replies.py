"""Interpretation of a guest's result: a value, the policy's mistake, or a lost sandbox."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from etude.agent.workspace import PathFault, WorkspaceError, WorkspaceLostError
from etude.agent.workspace.interface import printable_path
from etude.envserver.guest.calls import GuestReply
from etude.v1 import guest_pb2

_M = TypeVar("_M", bound=Message)

_FAULTS = {
    guest_pb2.GUEST_FAULT_NO_SUCH_FILE: PathFault.NO_SUCH_FILE,
    guest_pb2.GUEST_FAULT_IS_A_FOLDER: PathFault.IS_A_FOLDER,
    guest_pb2.GUEST_FAULT_NOT_A_FOLDER: PathFault.NOT_A_FOLDER,
    guest_pb2.GUEST_FAULT_NOT_A_FILE: PathFault.NOT_A_FILE,
    guest_pb2.GUEST_FAULT_BAD_NAME: PathFault.BAD_NAME,
    guest_pb2.GUEST_FAULT_LINK: PathFault.LINK,
    guest_pb2.GUEST_FAULT_TOO_LARGE: PathFault.TOO_LARGE,
    guest_pb2.GUEST_FAULT_TOO_MANY: PathFault.TOO_MANY,
    guest_pb2.GUEST_FAULT_TOO_SLOW: PathFault.TOO_SLOW,
    guest_pb2.GUEST_FAULT_DENIED: PathFault.DENIED,
    guest_pb2.GUEST_FAULT_NO_SPACE: PathFault.NO_SPACE,
}
FAULTS = {fault: number for number, fault in _FAULTS.items()}
"""Number of each fault on the wire."""
_SHOWN = frozenset(
    {
        *(PathFault.NO_SUCH_FILE, PathFault.NOT_A_FOLDER, PathFault.BAD_NAME),
        *(PathFault.DENIED, PathFault.NO_SPACE),
    }
)
"""Faults that the kernel reports; the folder on the host shortens the path of these only."""


def check_reply(reply: GuestReply, path: str) -> GuestReply:
    """Check that the guest did as asked; returns the reply.

    Raises:
        WorkspaceError: the policy can put it right.
        WorkspaceLostError: it cannot.
    """
    result = reply.result
    if result.status == guest_pb2.GUEST_STATUS_OK and reply.is_kept:
        return reply
    fault = _FAULTS.get(result.fault)
    if fault is None:
        status = _name(result.status)
        raise WorkspaceLostError(
            f"{printable_path(path)}: the guest answers {status}: {result.message}"
        )
    named = printable_path(path) if fault in _SHOWN else path
    raise WorkspaceError(fault, result.path if result.HasField("path") else named)


def require_reply(reply: GuestReply, path: str) -> GuestReply:
    """Check a reply to an operation of the platform, where no fault is the policy's.

    Raises:
        WorkspaceLostError: the guest failed, for any reason.
    """
    try:
        return check_reply(reply, path)
    except WorkspaceError as error:
        raise WorkspaceLostError(f"the guest failed: {error}") from error


def decode_body(reply: GuestReply, channel: int, message: _M) -> _M:
    """Decode the message that came as DATA.

    Raises:
        WorkspaceLostError: the guest sent something else.
    """
    try:
        message.ParseFromString(reply.data.get(channel, b""))
    except DecodeError as error:
        raise WorkspaceLostError(f"the guest sent no {type(message).__name__}") from error
    return message


def _name(status: int) -> str:
    known = status in guest_pb2.GuestStatus.values()
    return guest_pb2.GuestStatus.Name(guest_pb2.GuestStatus.ValueType(status)) if known else "?"
