"""One call of the reference agent: its stream, its credit, its answer."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from etude.agent.workspace import WorkspaceError
from etude.common.errors import EtudeError
from etude.envserver.guest import frames
from etude.envserver.guest.frames import BadFrameError, Frame, FrameFlag, FrameKind
from etude.envserver.guest.replies import FAULTS
from etude.v1 import guest_pb2

_MAX_KEPT_BYTES = 4 << 10
_STATUSES = {
    guest_pb2.GUEST_FAULT_NO_SUCH_FILE: guest_pb2.GUEST_STATUS_NOT_FOUND,
    guest_pb2.GUEST_FAULT_TOO_LARGE: guest_pb2.GUEST_STATUS_TOO_LARGE,
    guest_pb2.GUEST_FAULT_TOO_MANY: guest_pb2.GUEST_STATUS_TOO_LARGE,
    guest_pb2.GUEST_FAULT_TOO_SLOW: guest_pb2.GUEST_STATUS_TIMEOUT,
    guest_pb2.GUEST_FAULT_DENIED: guest_pb2.GUEST_STATUS_DENIED,
    guest_pb2.GUEST_FAULT_NO_SPACE: guest_pb2.GUEST_STATUS_TOO_LARGE,
}


class RefusedError(EtudeError):
    """An answer that is about no path."""

    def __init__(self, status: "guest_pb2.GuestStatus", text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True)
class Writer:
    """The way to the host, if there is one."""

    _to: asyncio.StreamWriter | None = None

    def connect(self, to: asyncio.StreamWriter | None) -> None:
        """Write there from now on; nowhere for None."""
        self._to = to

    def send(self, frame: Frame) -> None:
        """Write a whole frame."""
        if self._to is not None and not self._to.is_closing():
            self._to.write(frame.encoded())

    async def drain(self) -> None:
        """Wait until the host has taken most of it."""
        if self._to is not None:
            await self._to.drain()


Operation = Callable[["Call", Any], Awaitable[guest_pb2.GuestResult | None]]
"""What does a kind of call; None is plain success."""


@dataclass(slots=True)
class Call:
    """One request and the stream it is answered on."""

    stream: int
    writer: Writer
    root: str
    default_uid: int | None
    request: guest_pb2.GuestCall = field(default_factory=guest_pb2.GuestCall)
    task: asyncio.Task[None] | None = None
    is_over: bool = False
    """A RESET has ended its epoch: nothing more is sent."""
    on_signal: Callable[[int], None] = lambda _: None
    _why: "guest_pb2.GuestStatus | None" = None
    _answer: list[Frame] = field(default_factory=list)
    _kept_bytes: int = 0
    _credit: int = frames.WINDOW
    _window: int = frames.WINDOW
    _unreturned: int = 0
    _inbox: list[bytes] = field(default_factory=list)
    _has_all: bool = False
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def folder(self) -> str:
        """Where its paths and its command start.

        Raises:
            RefusedError: it names no absolute folder.
        """
        if self.request.cwd and not self.request.cwd.startswith("/"):
            raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, "cwd is not absolute")
        return self.request.cwd or self.root

    @property
    def uid(self) -> int | None:
        """Whose files and commands they are."""
        return self.request.uid if self.request.HasField("uid") else self.default_uid

    def take(self, frame: Frame) -> None:
        """Take a frame of the host.

        Raises:
            BadFrameError: data for an output.
        """
        match frame.kind:
            case FrameKind.CREDIT:
                self._credit = min(self._credit + frames.frame_number(frame), frames.MAX_CREDIT)
            case FrameKind.CANCEL:
                self.end(guest_pb2.GUEST_STATUS_CANCELLED)
            case FrameKind.SIGNAL:
                self.on_signal(frames.frame_number(frame))
            case _:
                self._take_data(frame)
        self._stirred.set()

    def tell(self, channel: int) -> None:
        """Send a frame without data: there is something to have."""
        self._send(Frame(self.stream, FrameKind.DATA, channel << 1))

    def _take_data(self, frame: Frame) -> None:
        if frame.channel:
            raise BadFrameError("data for an output")
        self._window -= len(frame.payload)
        if self._window < 0 or self._has_all:
            self.end(guest_pb2.GUEST_STATUS_INVALID)
        self._inbox += [frame.payload] if frame.payload else []
        self._has_all = bool(frame.flags & FrameFlag.END)

    def end(self, why: "guest_pb2.GuestStatus") -> None:
        """Stop before the time."""
        if self._why is None and self.task is not None:
            self._why = why
            self.task.cancel()

    async def receive(self) -> bytes | None:
        """The next piece of the host's data, None after the last."""
        while not self._inbox:
            if self._has_all:
                return None
            self._stirred.clear()
            await self._stirred.wait()
        piece = self._inbox.pop(0)
        self._unreturned += len(piece)
        if self._unreturned >= frames.WINDOW // 2:
            self._window += self._unreturned
            self.writer.send(frames.credit_frame(self.stream, self._unreturned))
            self._unreturned = 0
        return piece

    async def data(self, channel: int, data: bytes) -> None:
        """Send all the bytes of a channel, as the host's credit allows."""
        await self.piece(channel, data)
        self.end_data(channel)

    def end_data(self, channel: int) -> None:
        """Say that a channel has no more."""
        self._send(Frame(self.stream, FrameKind.DATA, channel << 1 | FrameFlag.END))

    async def piece(self, channel: int, data: bytes) -> None:
        """Send some bytes of a channel, as the host's credit allows."""
        view = memoryview(data)
        while view:
            while self._credit <= 0:
                self._stirred.clear()
                await self._stirred.wait()
            piece = bytes(view[: min(self._credit, frames.MAX_PAYLOAD)])
            view = view[len(piece) :]
            self._credit -= len(piece)
            self._send(Frame(self.stream, FrameKind.DATA, channel << 1, piece))
            await self.writer.drain()

    async def run(self, operation: Operation, agent: object) -> list[Frame]:
        """Do what is asked, answer, and return the frames to keep for a retry."""
        limit_s = self.request.deadline_ms / 1000 or None
        try:
            async with asyncio.timeout(limit_s):
                result = await operation(self, agent) or guest_pb2.GuestResult()
                result.status = guest_pb2.GUEST_STATUS_OK
        except asyncio.CancelledError:
            result = guest_pb2.GuestResult(status=self._why)
        except TimeoutError:
            result = guest_pb2.GuestResult(status=guest_pb2.GUEST_STATUS_TIMEOUT)
        except (EtudeError, OSError) as error:
            result = self._failure(error)
        return self._finish(result)

    def refuse(self, why: Exception) -> None:
        """Close the stream of a call that did nothing; the id stays free."""
        self._send(self._result(self._failure(why)))

    def replay(self, answer: list[Frame] | None) -> None:
        """Send what an earlier call with this id was told."""
        if answer is None:
            busy = "the call with this id still runs"
            self.refuse(RefusedError(guest_pb2.GUEST_STATUS_BUSY, busy))
            return
        for frame in answer:
            flags = frame.flags | (FrameFlag.REPLAYED if frame.kind is FrameKind.RESULT else 0)
            self._send(frame._replace(stream=self.stream, flags=flags))

    def _failure(self, error: Exception) -> guest_pb2.GuestResult:
        if isinstance(error, WorkspaceError):
            fault = FAULTS[error.fault]
            status = _STATUSES.get(fault, guest_pb2.GUEST_STATUS_INVALID)
            # The host knows the path of its own call better.
            path = None if error.path == _path(self.request) else error.path
            return guest_pb2.GuestResult(status=status, fault=fault, path=path)
        status = guest_pb2.GUEST_STATUS_INTERNAL
        if isinstance(error, RefusedError):
            status = error.status
        return guest_pb2.GuestResult(status=status, message=str(error))

    def _finish(self, result: guest_pb2.GuestResult) -> list[Frame]:
        frame = self._result(result)
        self._send(frame)
        if self._kept_bytes <= _MAX_KEPT_BYTES:
            return self._answer
        short = guest_pb2.GuestResult(status=result.status, fault=result.fault)
        if result.HasField("path"):
            short.path = result.path
        return [frame._replace(flags=FrameFlag.NOT_KEPT, payload=short.SerializeToString())]

    def _result(self, result: guest_pb2.GuestResult) -> Frame:
        return Frame(self.stream, FrameKind.RESULT, 0, result.SerializeToString())

    def _send(self, frame: Frame) -> None:
        self._kept_bytes += len(frame.payload)
        if self._kept_bytes <= _MAX_KEPT_BYTES:
            self._answer.append(frame)
        if not self.is_over:
            self.writer.send(frame)


def _path(request: guest_pb2.GuestCall) -> str:
    operation = request.WhichOneof("operation")
    return str(getattr(getattr(request, operation), "path", "")) if operation else ""
