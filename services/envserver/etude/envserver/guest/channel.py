"""Calls to the agent of one sandbox, many at a time over one byte stream.

Covered: every byte of the guest may be hostile. An invalid frame, a result for a stream that was
never opened, or silence after two RESETs ends the channel; all waiting calls fail with a lost
sandbox, and later bytes are ignored. The memory of a call is bounded.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message
from typing_extensions import override

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.guest import calls, frames
from etude.envserver.guest.calls import (
    GuestCaller,
    GuestReply,
    GuestRequest,
    OpenCall,
    StreamHandler,
)
from etude.envserver.guest.connections import GuestConnection
from etude.envserver.guest.frames import BadFrameError, Frame, FrameKind
from etude.v1 import guest_pb2

_HELD_BYTES = 16 << 10
"""More than this is written immediately, so that drain() sees the pressure."""


@dataclass(slots=True)
class WriteBuffer:
    """Write buffer: frames of one turn of the loop leave in one piece.

    A guest that waits is interrupted by each piece, and an emulated one pays more for that than for
    most of the calls.
    """

    writer: asyncio.StreamWriter
    _held: bytearray = field(default_factory=bytearray)

    @property
    def num_unsent(self) -> int:
        """Bytes that the stream has not taken yet."""
        return len(self._held) + self.writer.transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Write it before this turn of the loop ends, behind all that was put before."""
        if not self._held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._held += data
        if len(self._held) > _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if self._held and not self.writer.is_closing():
            self.writer.write(bytes(self._held))
        self._held.clear()

    def close(self) -> None:
        """End the stream behind what was put."""
        self.flush()
        self.writer.close()


_M = TypeVar("_M", bound=Message)

ACK_TIMEOUT_S = 0.25
"""A guest that is between two frames answers a RESET in a millisecond."""
LAST_ACK_TIMEOUT_S = 5.0
"""After the padding every live guest answers; on a busy host it may take this long."""
GRACE_S = 5.0
"""How much later than its deadline a call may be answered."""
CANCEL_S = 2.0
"""How long a guest may take to end a cancelled call."""
MAX_CALLS = 32
"""Calls at a time; the guest itself refuses more than 64."""
_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 1 << 20
"""A guest that does not read is given up beyond this."""


class GuestLostError(WorkspaceLostError):
    """The guest is gone, or no longer trusted: retry the rollout, never score it."""

    reason = "EnvironmentLost"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestIdentity:
    """Identity that makes a restored clone a sandbox of its own."""

    env_id: str
    token: bytes
    """Token of calls; empty for a template, which refuses every call."""
    generation: int
    hostname: str = ""
    machine_id: bytes = b""


class ResetState(NamedTuple):
    """State of a guest when its channel is reset."""

    boot_id: bytes
    generation: int
    jobs: Mapping[int, bytes]
    """Background jobs that run, and the calls that started them."""


@dataclass(slots=True)
class GuestChannel(GuestCaller):
    """One epoch after the other over one stream; start with reset(), then sync()."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    on_event: Callable[[guest_pb2.GuestEvent], None] = lambda _: None
    ack_timeout_s: float = ACK_TIMEOUT_S
    last_ack_timeout_s: float = LAST_ACK_TIMEOUT_S
    token: bytes = b""
    _outbox: WriteBuffer = field(init=False)
    _parser: frames.FrameParser = field(
        default_factory=lambda: frames.FrameParser(frames.FROM_GUEST)
    )
    _epoch: int = 0
    _nonce: bytes = b""
    _last_stream: int = 0
    _open: dict[int, StreamHandler] = field(default_factory=dict)
    _awaited: dict[tuple[FrameKind, bytes], asyncio.Future[Frame]] = field(default_factory=dict)
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CALLS))
    _bulk: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one connection that writes: all of them together may not fill the port."""
    _task: asyncio.Task[None] | None = None
    _lost: str = ""

    def __post_init__(self) -> None:
        self._outbox = WriteBuffer(self.writer)

    @property
    def is_lost(self) -> bool:
        """True once the guest was given up."""
        return bool(self._lost)

    async def hello(self, *, timeout_s: float) -> guest_pb2.GuestHello:
        """Wait for the first message of a guest that has just booted; then reset() the channel.

        Raises:
            GuestLostError: it sends nothing, or something else.
        """
        frame = await self._answer(FrameKind.HELLO, b"", timeout_s)
        if frame is None:
            raise self._give_up(f"the guest did not say hello in {timeout_s:g} s")
        return self._decoded(guest_pb2.GuestHello(), frame.payload)

    async def reset(self) -> ResetState:
        """Begin an epoch, discarding everything in flight in either direction.

        Raises:
            GuestLostError: the guest does not answer, or the channel was lost before.
        """
        self._check()
        self._end_calls("the channel was reset")
        self._epoch += 1
        self._last_stream = 0
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self._parser.seek_ack(self._nonce)
        again = frames.reset_frame(self._nonce, self._epoch).encoded()
        for padding, timeout_s in (
            (b"", self.ack_timeout_s),
            (frames.PADDING, self.last_ack_timeout_s),
        ):
            self._write(padding + again)
            frame = await self._answer(FrameKind.RESET_ACK, self._nonce, timeout_s)
            if frame is not None:
                return self._state(frame)
        raise self._give_up("the guest answers no RESET")

    async def sync(self, identity: GuestIdentity) -> None:
        """Give the guest its clock, randomness, names and token.

        Raises:
            GuestLostError: a step failed; such a clone may not be used.
        """
        body = calls.sync_message(identity.token, time.time_ns())
        body.env_id, body.generation = identity.env_id, identity.generation
        body.hostname, body.machine_id = identity.hostname, identity.machine_id
        self._write(Frame(0, FrameKind.SYNC, 0, body.SerializeToString()).encoded())
        frame = await self._answer(FrameKind.SYNC_ACK, b"", GRACE_S)
        if frame is None:
            raise self._give_up("the guest answers no SYNC")
        ack = self._decoded(guest_pb2.GuestSyncAck(), frame.payload)
        if ack.failed or ack.generation != identity.generation:
            raise self._give_up(f"the guest could not take its identity: {list(ack.failed)}")
        self.token = identity.token

    async def ping(self, *, timeout_s: float = CANCEL_S) -> bool:
        """True if the guest answers in time."""
        payload = secrets.token_bytes(8)
        self._write(Frame(0, FrameKind.PING, 0, payload).encoded())
        return await self._answer(FrameKind.PONG, payload, timeout_s) is not None

    @override
    async def call(self, request: GuestRequest) -> GuestReply:
        async with self._places:
            self._check()
            self._last_stream += 1
            stream = self._last_stream
            future: asyncio.Future[GuestReply] = asyncio.get_running_loop().create_future()
            call = OpenCall(stream, request.max_bytes, future, request.call_id)
            self._open[stream] = call
            try:
                self._write(b"".join(calls.encode_call(stream, request, self.token)))
                return await self._result(call, request)
            except (asyncio.CancelledError, calls.ReplyTooLargeError):
                if not self._lost:
                    self._write(Frame(stream, FrameKind.CANCEL).encoded())
                raise
            finally:
                self._open.pop(stream, None)

    async def accept(self, port: int) -> GuestConnection:
        """Accept the next connection of a program in the guest to this port of its own localhost.

        It takes no slot of calls, and waits without a limit for a connection.

        Raises:
            GuestLostError: the guest is gone, or was reset.
            PortTakenError: the guest does not listen there.
            CancelledError: the caller has gone; so has the connection, if there was one.
        """
        self._check()
        self._last_stream += 1
        made = GuestConnection(self._last_stream, self._write, self.writer.drain, self._bulk)
        self._open[made.stream] = made
        made.on_end = lambda: self._forget(made)
        operation = guest_pb2.GuestCall(accept=guest_pb2.GuestAccept(port=port))
        request = GuestRequest(operation=operation, call_id=made.call_id)
        try:
            self._write(b"".join(calls.encode_call(made.stream, request, self.token)))
            await made.accepted
        except BaseException:
            await made.close()
            raise
        return made

    def _forget(self, made: GuestConnection) -> None:
        # After a reset the number is another stream's.
        if self._open.get(made.stream) is made:
            del self._open[made.stream]

    def signal(self, call_id: bytes, number: int) -> None:
        """Send a signal to the process group of the call with this id, if it still runs."""
        for call in self._open.values():
            if call.call_id == call_id:
                frame = Frame(call.stream, FrameKind.SIGNAL, 0, number.to_bytes(4, "little"))
                self._write(frame.encoded())

    async def close(self) -> None:
        """End the channel; the guest itself goes on."""
        self._lose("the channel was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _result(self, call: OpenCall, request: GuestRequest) -> GuestReply:
        if request.data is None:
            return await self._await_reply(call, request)
        sending = self._send_data(call, request.data)
        sender = asyncio.create_task(sending, name=f"guest stream {call.stream}")
        try:
            return await self._await_reply(call, request)
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _await_reply(self, call: OpenCall, request: GuestRequest) -> GuestReply:
        limit_s = None if request.deadline_s is None else request.deadline_s + GRACE_S
        done, _ = await asyncio.wait([call.future], timeout=limit_s)
        if not done:
            self._write(Frame(call.stream, FrameKind.CANCEL).encoded())
            done, _ = await asyncio.wait([call.future], timeout=CANCEL_S)
        if not done:
            raise self._give_up(f"a call had no answer in {limit_s:g} s")
        return call.future.result()

    async def _send_data(self, call: OpenCall, data: bytes) -> None:
        with contextlib.suppress(OSError, GuestLostError):  # the reader fails the waiting calls
            async for frame in call.outgoing(data):
                self._write(frame.encoded())
                await self.writer.drain()

    async def _answer(self, kind: FrameKind, key: bytes, timeout_s: float) -> Frame | None:
        self._check()
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="guest channel")
        future = self._awaited.get((kind, key))
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._awaited[kind, key] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(future)
        except TimeoutError:
            return None
        finally:
            self._awaited.pop((kind, key), None)

    async def _read(self) -> None:
        try:
            while data := await self.reader.read(_READ_BYTES):
                for frame in self._parser.feed(data):
                    self._take(frame)
            self._lose("the guest closed its channel")
        except (OSError, BadFrameError, DecodeError, GuestLostError) as error:
            self._lose(f"the guest broke its channel: {error}")

    def _take(self, frame: Frame) -> None:
        if frame.stream:
            self._take_on_stream(frame)
        elif frame.kind is FrameKind.PING:
            self._write(frame._replace(kind=FrameKind.PONG).encoded())
        elif frame.kind is FrameKind.EVENT:
            self.on_event(guest_pb2.GuestEvent.FromString(frame.payload))
        else:
            self._resolve(frame)

    def _resolve(self, frame: Frame) -> None:
        key = frame.payload if frame.kind is FrameKind.PONG else b""
        if frame.kind is FrameKind.RESET_ACK:
            key = frames.reset_fields(frame).nonce
        future = self._awaited.get((frame.kind, key))
        if future is not None and not future.done():
            future.set_result(frame)
        elif frame.kind not in {FrameKind.PONG, FrameKind.HELLO} and key != self._nonce:
            # A late PONG and a second answer to the same RESET are honest, this is not.
            raise BadFrameError(f"unexpected {frame.kind.name}")

    def _take_on_stream(self, frame: Frame) -> None:
        call = self._open.get(frame.stream)
        if call is None:
            if frame.stream > self._last_stream:
                raise BadFrameError(f"{frame.kind.name} for stream {frame.stream}, never opened")
            return  # cancelled a moment ago
        granted = call.take(frame)
        if granted:
            self._write(frames.credit_frame(frame.stream, granted).encoded())

    def _write(self, data: bytes) -> None:
        self._check()
        self._outbox.write(data)
        if self._outbox.num_unsent > _MAX_UNSENT_BYTES + len(data):
            raise self._give_up("the guest does not listen")

    def _state(self, frame: Frame) -> ResetState:
        ack = self._decoded(guest_pb2.GuestResetAck(), frames.reset_fields(frame).body)
        jobs = {each.job: each.call_id for each in ack.open if each.background}
        return ResetState(ack.boot_id, ack.generation, jobs)

    def _decoded(self, message: _M, payload: bytes) -> _M:
        try:
            message.ParseFromString(payload)
        except DecodeError as error:
            raise self._give_up(f"the guest sent no {type(message).__name__}") from error
        return message

    def _check(self) -> None:
        if self._lost:
            raise GuestLostError(self._lost)

    def _give_up(self, why: str) -> GuestLostError:
        self._lose(why)
        return GuestLostError(self._lost)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self._end_calls(self._lost)
        for future in self._awaited.values():
            if not future.done():
                future.set_exception(GuestLostError(self._lost))
                future.exception()  # its waiter may have gone
        self._outbox.close()

    def _end_calls(self, why: str) -> None:
        for call in list(self._open.values()):
            call.fail(GuestLostError(why))
