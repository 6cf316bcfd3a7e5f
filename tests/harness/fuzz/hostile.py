"""python -m tests.harness.fuzz.hostile: guests that say what they like, one process each.

Each line on the input, `FOLDER SEED`, is answered with the id of a process that stands for a
machine: in the folder it serves one monitor and one agent. The seed `honest` is a good guest's.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness.fuzz import mutator
from tests.harness.fuzz.mutator import Mutator

from etude.envserver.guest import frames
from etude.envserver.guest.frames import Frame, FrameFlag, FrameKind, FrameParser
from etude.v1 import guest_pb2

HONEST = "honest"
_NUMBER = re.compile(rb'"id": ?(\d+)')
_DIE_WITH_PARENT = 1
_DONE = guest_pb2.GuestResult(status=guest_pb2.GUEST_STATUS_OK)
_ENDS = frozenset({FrameKind.RESET_ACK, FrameKind.SYNC_ACK})
"""Nobody's answer when nobody has asked: these end a channel at once, and most guests wait."""


@dataclass(slots=True)
class Guest:
    """Does what makes a node go on, and more than that."""

    hostile: Mutator | None
    patience: int = 0
    """Calls that it answers before it shows what it is."""
    parser: FrameParser = field(default_factory=lambda: FrameParser(frames.FROM_HOST))
    last_stream: int = 1
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, folder: Path, listeners: list[socket.socket]) -> None:
        """Until the node hangs up."""
        self.parser.seek_reset()
        os.chdir(folder)
        qmp, agent = listeners
        async with (
            await asyncio.start_unix_server(self._monitor, sock=qmp),
            await asyncio.start_unix_server(self._agent, sock=agent),
        ):
            await self.ended.wait()

    async def _monitor(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps({"QMP": {}}).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for number in _NUMBER.findall(data):  # of each command, however many came at once
                    answer = {"return": {}, "id": int(number)}
                    writer.write(json.dumps(answer).encode() + b"\n")
        self.ended.set()

    async def _agent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                for frame in self.parser.feed(data):
                    writer.write(self._answer(frame))
                await writer.drain()
        self.ended.set()

    def _answer(self, frame: Frame) -> bytes:
        match frame.kind:
            case FrameKind.RESET:
                asked = frames.reset_fields(frame)
                noise = self._said(3) if self._dares(0.1) else b""
                return noise + frames.reset_ack_frame(asked.nonce, asked.epoch, b"").encoded()
            case FrameKind.SYNC:
                generation = guest_pb2.GuestSync.FromString(frame.payload).generation
                ack = guest_pb2.GuestSyncAck(generation=generation)
                return Frame(0, FrameKind.SYNC_ACK, 0, ack.SerializeToString()).encoded()
            case FrameKind.PING:
                return frame._replace(kind=FrameKind.PONG).encoded()
            case FrameKind.CALL if not frame.flags & FrameFlag.MORE:
                return self._called(frame)
            case _:
                return b""

    def _called(self, frame: Frame) -> bytes:
        self.last_stream = frame.stream
        self.patience -= 1
        result = Frame(frame.stream, FrameKind.RESULT, 0, _DONE.SerializeToString()).encoded()
        return (self._said(60) if self.patience < 0 and self._dares(0.3) else b"") + result

    def _dares(self, share: float) -> bool:
        return self.hostile is not None and self.hostile.chance.random() < share

    def _said(self, most: int) -> bytes:
        if self.hostile is None:
            return b""
        pieces = range(self.hostile.chance.randint(1, most))
        return b"".join(self.hostile.piece(self.last_stream) for _ in pieces)


def made(seed: str, recorded: list[Frame]) -> Guest:
    """The guest of a seed."""
    if seed == HONEST:
        return Guest(None)
    hostile = Mutator(seed=seed, frames=recorded, wildness=0.002, answers=True)
    return Guest(hostile, patience=hostile.chance.choice((0, 3, 10)))


def main() -> None:
    """Make guests until the input ends; all of them end with this process."""
    libc = ctypes.CDLL(None)
    recorded = [frame for frame in mutator.from_guest() if frame.kind not in _ENDS]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        folder, seed = line.rstrip("\n").split("\t")
        listeners = []
        os.chdir(folder)  # a socket's path has at most 107 bytes
        for name in ("qmp", "agent"):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(name)
            listener.listen(1)
            listeners.append(listener)
        pid = os.fork()
        if pid == 0:
            libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            asyncio.run(made(seed, recorded).serve(Path(folder), listeners))
            os._exit(0)
        for listener in listeners:
            listener.close()
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
