"""A guest agent in plain Python: oracle of the one in Go, and its stand-in where there is no Go.

It speaks the same frames over standard input and output or a Unix socket, does files with the
workspace of a folder, and is in no hurry. It is no first process of a machine.
"""

import argparse
import asyncio
import hashlib
import hmac
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError
from tests.support.reference_guest.accept import ReferencePort, accept
from tests.support.reference_guest.calls import Call, RefusedError, Writer
from tests.support.reference_guest.changes import CHANGES
from tests.support.reference_guest.files import FILES, Marks
from tests.support.reference_guest.jobs import Jobs
from tests.support.reference_guest.sessions import PROCESSES, Sessions

from etude.envserver.guest import frames
from etude.envserver.guest.frames import BadFrameError, Frame, FrameFlag, FrameKind
from etude.v1 import guest_pb2

_READ_BYTES = 256 << 10
_MAX_OPEN_CALLS = 64
_MAX_RESULTS = 256
_ID_BYTES = 16
_OPERATIONS = {**FILES, **CHANGES, **PROCESSES, "accept": accept}


@dataclass(slots=True)
class Agent:
    """Serves one sandbox."""

    root: str
    state: Path
    uid: int | None = None
    """Whose commands and files they are; None is this process's user."""
    writer: Writer = field(default_factory=Writer)
    jobs: Jobs = field(init=False)
    sessions: Sessions = field(default_factory=Sessions)
    marks: Marks = field(default_factory=dict)
    door: ReferencePort = field(default_factory=ReferencePort)
    _parser: frames.FrameParser = field(
        default_factory=lambda: frames.FrameParser(frames.FROM_HOST)
    )
    _calls: dict[int, Call] = field(default_factory=dict)
    _parts: dict[int, bytes] = field(default_factory=dict)
    _last_stream: int = 0
    _token_sha256: bytes = b""
    _generation: int = 0
    _results: OrderedDict[bytes, list[Frame] | None] = field(default_factory=OrderedDict)
    """Answers by call id; None while the call runs."""
    _boot_id: bytes = field(default_factory=lambda: os.urandom(16))

    def __post_init__(self) -> None:
        self.jobs = Jobs(self.state, self._job_ended)

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_first: bool = True
    ) -> None:
        """Take frames until the host goes away."""
        self._parser.drop()
        self.writer.connect(writer)
        if is_first:
            hello = guest_pb2.GuestHello(protocol=1, version="1", boot_id=self._boot_id)
            self.writer.send(Frame(0, FrameKind.HELLO, 0, hello.SerializeToString()))
        while data := await reader.read(_READ_BYTES):
            self._feed(data)
            await self.writer.drain()
        self.writer.connect(None)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                for frame in self._parser.feed(data):
                    self._take(frame)
            except (BadFrameError, DecodeError):
                self._parser.seek_reset()
                data = b""
            else:
                return

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.RESET:
                self._reset(frames.reset_fields(frame))
            case FrameKind.SYNC:
                self._sync(guest_pb2.GuestSync.FromString(frame.payload))
            case FrameKind.PING:
                self.writer.send(frame._replace(kind=FrameKind.PONG))
            case FrameKind.CALL:
                self._call(frame)
            case FrameKind.PONG:
                pass
            case _:
                call = self._calls.get(frame.stream)
                if call is not None:
                    call.take(frame)
                elif frame.kind is FrameKind.DATA and frame.channel:
                    return

    def _reset(self, asked: frames.ResetFields) -> None:
        ack = guest_pb2.GuestResetAck(boot_id=self._boot_id, generation=self._generation)
        for call in self._calls.values():
            ack.open.add(stream=call.stream, call_id=call.request.id)
            call.is_over = True
            call.end(guest_pb2.GUEST_STATUS_CANCELLED)
        ack.open.extend(self.jobs.open())
        self._calls.clear()
        self._parts.clear()
        self._last_stream = 0
        self.writer.send(frames.reset_ack_frame(asked.nonce, asked.epoch, ack.SerializeToString()))

    def _sync(self, sync: guest_pb2.GuestSync) -> None:
        self._token_sha256, self._generation = sync.token_sha256, sync.generation
        ack = guest_pb2.GuestSyncAck(generation=sync.generation)
        self.writer.send(Frame(0, FrameKind.SYNC_ACK, 0, ack.SerializeToString()))

    def _call(self, frame: Frame) -> None:
        stream = frame.stream
        part = self._parts.pop(stream, None)
        is_used = part is None and stream <= self._last_stream
        body = (part or b"") + frame.payload
        if stream in self._calls or is_used or len(body) > frames.MAX_CALL_BYTES:
            raise BadFrameError("a stream is never used again")
        self._last_stream = max(self._last_stream, stream)
        if frame.flags & FrameFlag.MORE:
            self._parts[stream] = body
            return
        call = Call(stream, self.writer, self.root, self.uid)
        try:
            call.request.ParseFromString(body)
            self._admit(call)
        except DecodeError:
            call.refuse(RefusedError(guest_pb2.GUEST_STATUS_INVALID, "not a call"))
        except RefusedError as refusal:
            call.refuse(refusal)

    def _admit(self, call: Call) -> None:
        request = call.request
        if len(request.id) != _ID_BYTES:
            raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, "not a call")
        digest = hashlib.sha256(request.token).digest()
        if not self._token_sha256 or not hmac.compare_digest(digest, self._token_sha256):
            raise RefusedError(guest_pb2.GUEST_STATUS_DENIED, "not the token of this generation")
        if request.id in self._results:
            call.replay(self._results[request.id])
            return
        if len(self._calls) >= _MAX_OPEN_CALLS:
            raise RefusedError(guest_pb2.GUEST_STATUS_BUSY, "too many open calls")
        self._results[request.id] = None
        self._calls[call.stream] = call
        call.task = asyncio.create_task(self._run(call), name=f"stream {call.stream}")

    async def _run(self, call: Call) -> None:
        operation = call.request.WhichOneof("operation") or ""
        answer = await call.run(_OPERATIONS.get(operation, _unknown), self)
        if operation == "accept":
            # Nobody can have a connection twice.
            self._results.pop(call.request.id, None)
        else:
            self._results[call.request.id] = answer
            self._results.move_to_end(call.request.id)
        while len(self._results) > _MAX_RESULTS and None is not next(iter(self._results.values())):
            self._results.popitem(last=False)
        if self._calls.get(call.stream) is call:
            del self._calls[call.stream]

    def _job_ended(self, ended: guest_pb2.GuestJobExit) -> None:
        event = guest_pb2.GuestEvent(job_exit=ended)
        self.writer.send(Frame(0, FrameKind.EVENT, 0, event.SerializeToString()))


async def _unknown(_call: Call, _agent: object) -> None:
    why = "the call asks for nothing that is known here"
    raise RefusedError(guest_pb2.GUEST_STATUS_INVALID, why)


async def _serve_stdio(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, sys.stdout.buffer
    )
    await agent.serve(reader, asyncio.StreamWriter(transport, protocol, None, loop))
    agent.jobs.kill_all()


async def _serve_socket(agent: Agent, path: str) -> None:
    hosts = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal hosts
        hosts += 1
        await agent.serve(reader, writer, is_first=hosts == 1)
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    await server.serve_forever()


def main() -> None:
    """Serve one sandbox until the host goes away."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="/workspace")
    parser.add_argument("--state", type=Path, default=Path("/run/guestagent"))
    parser.add_argument("--uid", type=int, default=-1)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--stdio", action="store_true")
    way.add_argument("--socket")
    given = parser.parse_args()
    agent = Agent(given.root, given.state, given.uid if given.uid >= 0 else None)
    asyncio.run(_serve_socket(agent, given.socket) if given.socket else _serve_stdio(agent))


if __name__ == "__main__":
    main()
