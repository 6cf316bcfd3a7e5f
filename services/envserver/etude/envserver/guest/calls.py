"""Calls to a guest: request, reply, and the state of an open stream."""

import asyncio
import hashlib
import math
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from typing_extensions import override

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.guest import frames
from etude.envserver.guest.frames import Frame, FrameFlag, FrameKind
from etude.v1 import guest_pb2

MAX_REPLY_BYTES = 16 << 20
"""DATA of one call unless it asks for more: twice the largest file."""
CONTROLLERS_JOBS = 1 << 31
"""Numbers of the controller's jobs begin behind this one, and no tool of the policy says them."""
_MAX_DEADLINE_MS = (1 << 32) - 1


class ReplyTooLargeError(WorkspaceLostError):
    """A guest sent more than the caller accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRequest:
    """An operation for a guest."""

    operation: guest_pb2.GuestCall
    """The operation and where it acts; id, token and deadline are filled in."""
    data: bytes | None = None
    """DATA for channel 0 of the call."""
    deadline_s: float | None = None
    """The guest ends the call after this; None leaves it to the operation's own limit."""
    max_bytes: int = MAX_REPLY_BYTES
    call_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """The same id gets the same result again, and nothing is done twice."""


class GuestReply(NamedTuple):
    """Outcome of a call."""

    result: guest_pb2.GuestResult
    data: dict[int, bytes]
    """DATA by channel."""
    is_replayed: bool
    """True for the result of an earlier call with this id."""
    is_kept: bool
    """True if nothing is missing: a long answer of an earlier call is not kept."""


class GuestCaller(Protocol):
    """Calls a guest, which may have to be resumed first."""

    async def call(self, request: GuestRequest) -> GuestReply:
        """Send a call and wait for its result. Cancelling cancels it in the guest too.

        Raises:
            GuestLostError: the guest is gone, or does not answer in time.
            ReplyTooLargeError: it sends more than the request allows.
            CancelledError: the caller has gone.
        """
        ...


class StreamHandler(Protocol):
    """Handler of the frames of one open stream."""

    call_id: bytes
    stream: int

    def take(self, frame: Frame) -> int:
        """Handle one frame of this stream; returns the credit to give back now.

        Raises:
            BadFrameError: the frame is invalid here.
        """
        ...

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        ...


def encode_call(stream: int, request: GuestRequest, token: bytes) -> Iterator[bytes]:
    """Encode a CALL in as many frames as it needs.

    Raises:
        ValueError: it is longer than a guest takes.
    """
    call = guest_pb2.GuestCall()
    call.CopyFrom(request.operation)
    call.id, call.token = request.call_id, token
    if request.deadline_s is not None:
        call.deadline_ms = min(math.ceil(request.deadline_s * 1000), _MAX_DEADLINE_MS)
    body = call.SerializeToString()
    if len(body) > frames.MAX_CALL_BYTES:
        raise ValueError(f"a call of {len(body)} bytes; guests take {frames.MAX_CALL_BYTES}")
    while len(body) > frames.MAX_PAYLOAD:
        piece, body = body[: frames.MAX_PAYLOAD], body[frames.MAX_PAYLOAD :]
        yield Frame(stream, FrameKind.CALL, FrameFlag.MORE, piece).encoded()
    yield Frame(stream, FrameKind.CALL, 0, body).encoded()


def sync_message(token: bytes, wall_ns: int) -> guest_pb2.GuestSync:
    """A SYNC with fresh entropy; with an empty token the guest refuses every call."""
    digest = hashlib.sha256(token).digest() if token else b""
    return guest_pb2.GuestSync(
        wall_ns=wall_ns, entropy=secrets.token_bytes(32), token_sha256=digest
    )


@dataclass(slots=True)
class OpenCall(StreamHandler):
    """The state of one stream until its result."""

    stream: int
    max_bytes: int
    future: asyncio.Future[GuestReply]
    call_id: bytes
    _channels: dict[int, bytearray] = field(default_factory=dict)
    _total: int = 0
    _unreturned: int = 0
    _credit: int = frames.WINDOW
    """What the host may still send."""
    _credited: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    def take(self, frame: Frame) -> int:
        # Held data is bounded by max_bytes, whatever credit a guest assumes.
        if frame.kind is FrameKind.CREDIT:
            self._credit = min(self._credit + frames.frame_number(frame), frames.MAX_CREDIT)
            self._credited.set()
            return 0
        if frame.kind is FrameKind.DATA:
            return self._take_data(frame)
        self._take_result(frame)
        return 0

    @override
    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # marks it as retrieved: there may be no waiter

    async def outgoing(self, data: bytes) -> AsyncIterator[Frame]:
        """Frames that carry the data, each as soon as there is credit for it."""
        view = memoryview(data)
        while view:
            while self._credit <= 0:
                self._credited.clear()
                await self._credited.wait()
            piece = view[: min(len(view), self._credit, frames.MAX_PAYLOAD)]
            view = view[len(piece) :]
            self._credit -= len(piece)
            yield Frame(self.stream, FrameKind.DATA, 0 if view else FrameFlag.END, bytes(piece))
        if not data:
            yield Frame(self.stream, FrameKind.DATA, FrameFlag.END)

    def _take_data(self, frame: Frame) -> int:
        size = len(frame.payload)
        self._total += size
        if self._total > self.max_bytes:
            self._channels.clear()
            self.fail(ReplyTooLargeError(f"more than {self.max_bytes} bytes"))
            return 0
        self._channels.setdefault(frame.channel, bytearray()).extend(frame.payload)
        self._unreturned += size
        if self._unreturned < frames.WINDOW // 2:
            return 0
        granted, self._unreturned = self._unreturned, 0
        return granted

    def _take_result(self, frame: Frame) -> None:
        if self.future.done():
            return
        result = guest_pb2.GuestResult.FromString(frame.payload)
        self.future.set_result(
            GuestReply(
                result,
                {channel: bytes(data) for channel, data in self._channels.items()},
                bool(frame.flags & FrameFlag.REPLAYED),
                not frame.flags & FrameFlag.NOT_KEPT,
            )
        )
