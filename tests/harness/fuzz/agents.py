"""A hostile host at the agent of a guest, which goes on and tells the truth after every RESET.

What it does is confined to a folder: calls that the agent admits are rebuilt to act there and to
run nothing; all others carry a token that was never valid.
"""

import asyncio
import secrets
import tempfile
from asyncio.subprocess import Process
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError
from tests.harness.fuzz import mutator, wire
from tests.harness.fuzz.counts import Counts
from tests.harness.fuzz.mutator import Mutator
from tests.support.vm import guests

from etude.envserver.guest import calls, frames
from etude.envserver.guest.frames import BadFrameError, Frame, FrameKind, FrameParser
from etude.v1 import guest_pb2

PATIENCE_S = 120.0
_ROUND = 120
_PING_EVERY = 8
"""What came before a PING that is answered was taken; after a frame that is none nothing is."""
_SAFE = frozenset(
    {
        *("read", "write", "list", "glob", "stat", "delete", "grep", "hashes"),
        *("mark", "diff", "walk", "job"),
    }
)
_DEADLINE_MS = 2_000
_TOKEN = secrets.token_bytes(16)


@dataclass(slots=True)
class Host:
    """The hostile end of two pipes."""

    process: Process
    root: Path
    counts: Counts = field(default_factory=Counts)
    _parser: FrameParser = field(default_factory=lambda: FrameParser(frames.FROM_GUEST))
    _pongs: int = 0
    _acks: dict[bytes, asyncio.Event] = field(default_factory=dict)
    _results: dict[int, int] = field(default_factory=dict)

    async def listen(self) -> None:
        """Take what the agent says, which has to be frames, until it ends."""
        assert self.process.stdout is not None
        try:
            while data := await self.process.stdout.read(1 << 18):
                for frame in self._parser.feed(data):
                    self._hear(frame)
        except BadFrameError as error:
            self.counts.crash(f"the agent says what is no frame: {error}", b"")

    async def begin(self, *before: bytes) -> bool:
        """Begin an epoch; False if the agent does not answer any more."""
        assert self.process.stdin is not None
        nonce = secrets.token_bytes(frames.NONCE_BYTES)
        answered = self._acks[nonce] = asyncio.Event()
        sync = Frame(0, FrameKind.SYNC, 0, calls.sync_message(_TOKEN, 0).SerializeToString())
        # The padding completes whatever was begun.
        self._write(*before, frames.PADDING, frames.reset_frame(nonce, 1).encoded(), sync.encoded())
        try:
            async with asyncio.timeout(PATIENCE_S):
                await answered.wait()
        except TimeoutError:
            self.counts.hang("the agent answers no RESET", b"".join(before))
            return False
        del self._acks[nonce]
        return True

    async def attack(self, hostile: Mutator) -> bool:
        """One round; False if it was the last."""
        said, answered, stream = [], self._pongs, 0
        for number in range(1, _ROUND + 1):
            piece = self._piece(hostile, stream)
            stream += piece[8:9] == bytes([FrameKind.CALL])
            said.append(piece)
            if number % _PING_EVERY == 0:
                said.append(Frame(0, FrameKind.PING, 0, b"taken?").encoded())
        said.append(hostile.piece(stream + 1))
        goes_on = await self.begin(*said)
        self.counts.frames += (self._pongs - answered) * _PING_EVERY
        if self.process.returncode is not None:
            self.counts.crash(f"the agent ended with {self.process.returncode}", b"".join(said))
            return False
        return goes_on

    async def is_well(self) -> bool:
        """Whether it does what an honest host asks."""
        (self.root / "f").write_bytes(b"still here")
        read = guest_pb2.GuestCall(read=guest_pb2.GuestRead(path="f"), cwd=str(self.root))
        request = calls.GuestRequest(operation=read, deadline_s=PATIENCE_S)
        self._results.clear()
        self._write(*calls.encode_call(1, request, _TOKEN))
        await guests.until(lambda: 1 in self._results)
        return self._results[1] == guest_pb2.GUEST_STATUS_OK

    def _piece(self, hostile: Mutator, stream: int) -> bytes:
        frame = hostile.chance.choice(hostile.frames)
        if frame.kind is FrameKind.CALL:
            payload = wire.damaged(frame.payload, hostile.chance)
            if hostile.chance.random() < 0.6:
                payload = self._admitted(payload, hostile)
            flags = hostile.chance.choice((0, 0, 0, 0, frame.flags))
            return Frame(stream + 1, FrameKind.CALL, flags, payload[: frames.MAX_PAYLOAD]).encoded()
        return hostile.piece(stream + 1)

    def _admitted(self, payload: bytes, hostile: Mutator) -> bytes:
        try:
            call = guest_pb2.GuestCall.FromString(payload)
        except DecodeError:
            return payload
        if call.WhichOneof("operation") not in _SAFE:
            return payload
        call.DiscardUnknownFields()
        call.ClearField("uid")
        call.id, call.token, call.cwd = hostile.chance.randbytes(16), _TOKEN, str(self.root)
        call.deadline_ms = min(call.deadline_ms or _DEADLINE_MS, _DEADLINE_MS)
        return call.SerializeToString()

    def _hear(self, frame: Frame) -> None:
        if frame.kind is FrameKind.PONG and frame.payload == b"taken?":
            self._pongs += 1
        elif frame.kind is FrameKind.RESET_ACK:
            answered = self._acks.get(frames.reset_fields(frame).nonce)
            if answered is not None:
                answered.set()
        elif frame.kind is FrameKind.RESULT:
            self._results[frame.stream] = guest_pb2.GuestResult.FromString(frame.payload).status

    def _write(self, *said: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(said))


async def run(seed: int, num_frames: int, agent: str = "go") -> Counts:
    """So many frames to one agent, which has to be well in the end."""
    recorded = [frame for frame in mutator.from_host() if frame.kind is not FrameKind.SYNC]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        root.mkdir()
        (root / "a.py").write_bytes(b"a\n" * 100)
        async with guests.raw(agent, root) as process:
            host = Host(process, root)
            listening = asyncio.create_task(host.listen(), name="hostile host")
            goes_on, number = await host.begin(), 0
            while goes_on and host.counts.frames < num_frames:
                number += 1
                name = f"agent {seed} {number}"
                hostile = Mutator(seed=name, frames=recorded, wildness=0.003)
                goes_on = await host.attack(hostile)
            if goes_on and not await host.is_well():
                host.counts.crash("the agent does not do an honest read any more", b"")
            listening.cancel()
            await asyncio.wait([listening])
    return host.counts
