"""Connections of programs inside a guest, as byte streams of the host: one call each."""

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from typing_extensions import override

from etude.common.errors import EtudeError
from etude.envserver.egress.byte_streams import ByteStream
from etude.envserver.guest import frames
from etude.envserver.guest.calls import StreamHandler
from etude.envserver.guest.frames import BadFrameError, Frame, FrameFlag, FrameKind
from etude.v1 import guest_pb2

LINGER_S = 5.0
"""How long a program may take to close a connection that is complete."""
_DATA_OUT = 1


class PortTakenError(EtudeError):
    """The guest cannot listen on its port."""


@dataclass(slots=True, eq=False)
class GuestConnection(StreamHandler, ByteStream):
    """One stream of a channel. Its buffer is bounded by the credit that it was given."""

    stream: int
    put: Callable[[bytes], None]
    """Writes to the guest; raises UnavailableError once it is lost."""
    drain: Callable[[], Awaitable[None]]
    bulk: asyncio.Lock
    call_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    on_end: Callable[[], object] = lambda: None
    accepted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _inbox: deque[bytes] = field(default_factory=deque)
    _held: int = 0
    """Bytes in the inbox and bytes read whose credit was not given back."""
    _unreturned: int = 0
    _credit: int = frames.WINDOW
    _has_all: bool = False
    _has_finished: bool = False
    _gone: str = ""
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    @override
    def take(self, frame: Frame) -> int:
        if frame.kind is FrameKind.CREDIT:
            self._credit = min(self._credit + frames.frame_number(frame), frames.MAX_CREDIT)
        elif frame.kind is FrameKind.DATA:
            self._take_data(frame)
        else:
            self._take_result(guest_pb2.GuestResult.FromString(frame.payload))
        self._stirred.set()
        return 0

    @override
    def fail(self, error: Exception) -> None:
        self._end(str(error))
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved

    @override
    async def read(self) -> bytes:
        while not self._inbox:
            if self._has_all:
                return b""
            if self._gone:
                raise ConnectionResetError(self._gone)
            await self._stir()
        data = self._inbox.popleft()
        self._unreturned += len(data)
        if self._unreturned >= frames.WINDOW // 2 and not self._gone:
            self._send(frames.credit_frame(self.stream, self._unreturned))
            self._held -= self._unreturned
            self._unreturned = 0
        return data

    @override
    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            while self._credit <= 0 and not self._gone:
                await self._stir()
            async with self.bulk:
                await self.drain()
                piece = view[: min(len(view), self._credit, frames.MAX_PAYLOAD)]
                view = view[len(piece) :]
                self._credit -= len(piece)
                self._send(Frame(self.stream, FrameKind.DATA, 0, bytes(piece)))

    @override
    async def finish(self) -> None:
        if not self._has_finished:
            self._has_finished = True
            self._send(Frame(self.stream, FrameKind.DATA, FrameFlag.END))

    @override
    async def close(self) -> None:
        try:
            if self._has_finished:
                # To cancel it now would take from the program what is still on its way.
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while await self.read():
                            pass
                        await self._is_ended()
            if not self._gone:
                with contextlib.suppress(OSError):
                    self._send(Frame(self.stream, FrameKind.CANCEL))
        finally:
            self._end("the connection was closed")

    async def _is_ended(self) -> None:
        while not self._gone:
            await self._stir()

    def _send(self, frame: Frame) -> None:
        if self._gone:
            raise ConnectionResetError(self._gone)
        try:
            self.put(frame.encoded())
        except EtudeError as error:
            raise ConnectionResetError(str(error)) from error

    def _take_data(self, frame: Frame) -> None:
        if frame.channel != _DATA_OUT or self._has_all:
            raise BadFrameError("data of a connection that has none")
        if not self.accepted.done():
            self.accepted.set_result(None)
        self._held += len(frame.payload)
        if self._held > frames.WINDOW:
            raise BadFrameError("more data than there was credit for")
        if frame.payload:
            self._inbox.append(frame.payload)
        self._has_all = bool(frame.flags & FrameFlag.END)

    def _take_result(self, result: guest_pb2.GuestResult) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(PortTakenError(result.message[:200] or "no connection"))
            self.accepted.exception()  # marks it as retrieved
        self._end("the program has closed its connection")

    def _end(self, why: str) -> None:
        self._gone = self._gone or why
        self._stirred.set()
        self.on_end()

    async def _stir(self) -> None:
        self._stirred.clear()
        await self._stirred.wait()
