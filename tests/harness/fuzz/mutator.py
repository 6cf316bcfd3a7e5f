"""Frames that no honest peer sends, made from those that one has sent."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import Message
from tests.harness.fuzz import wire

from etude.envserver.guest import frames
from etude.envserver.guest.frames import Frame, FrameFlag, FrameKind, FrameParser
from etude.v1 import environments_pb2, guest_pb2

CORPUS = Path(__file__).parents[2] / "corpus" / "frames"
GUEST, HOST = CORPUS / "guest.frames", CORPUS / "host.frames"
"""Frames of a golden run, as `python -m tests.harness.fuzz.recording` keeps them."""
_ANSWERS: list[tuple[int, bytes | Message]] = [
    (0, b"content"),
    (1, b"output"),
    (
        0,
        guest_pb2.GuestEntries(
            entries=[guest_pb2.GuestEntry(name="a.py", kind=guest_pb2.GUEST_KIND_FILE, size=9)] * 2
        ),
    ),
    (0, guest_pb2.GuestPaths(paths=["a.py", "../b", "/etc/passwd", ""])),
    (0, guest_pb2.GuestDigests(files=[guest_pb2.GuestDigest(path="a.py", sha256=b"x" * 32)] * 2)),
    (
        1,
        guest_pb2.GuestMatches(
            files=[
                guest_pb2.GuestFileMatches(
                    path="a.py",
                    lines=[guest_pb2.GuestLine(number=2**32 - 1, text="a", is_match=True)] * 2,
                    num_matches=2,
                )
            ],
            undecided=["b.py", "../c"],
        ),
    ),
    (
        0,
        environments_pb2.WorkspaceDiff(
            written=[environments_pb2.WorkspaceFile(path="a.py", content=b"a", executable=True)],
            deleted=["b.py", "../b"],
        ),
    ),
]
"""DATA that an operation may end with, and its channel."""
_DONE = Frame(
    1,
    FrameKind.RESULT,
    0,
    guest_pb2.GuestResult(status=guest_pb2.GUEST_STATUS_OK).SerializeToString(),
)
_EVERY_NUMBER = (0, 1, 2, 5, 6, 7, 64, 2**16 - 1, 2**16, 65_542, 65_543, 2**31, 2**32 - 1)


def recorded(path: Path, kinds: frozenset[FrameKind]) -> list[Frame]:
    """The frames of a file."""
    return list(FrameParser(kinds).feed(path.read_bytes()))


def from_guest() -> list[Frame]:
    """What a guest has sent."""
    return recorded(GUEST, frames.FROM_GUEST)


def from_host() -> list[Frame]:
    """What a host has sent."""
    return recorded(HOST, frames.FROM_HOST)


@dataclass(slots=True, kw_only=True)
class Mutator:
    """One hostile peer; the same seed says the same."""

    seed: str
    frames: Sequence[Frame]
    """What it begins with."""
    wildness: float
    """How much of what it sends has the wrong shape, which ends a channel."""
    answers: bool = False
    """Whether it also says what could be the answer to something."""
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def piece(self, last_stream: int) -> bytes:
        """The next frame, or what is in its place, for one of so many open streams."""
        if self.chance.random() < self.wildness:
            return self._wild()
        if self.answers and self.chance.random() < 0.2:
            return self._answer(self.chance.randint(1, last_stream))
        frame = self.chance.choice(self.frames)
        stream = self.chance.randint(1, max(1, last_stream)) if frame.stream else 0
        payload = frame.payload
        if self.chance.random() < 0.7 and frame.kind not in {
            FrameKind.CREDIT,
            FrameKind.PING,
            FrameKind.PONG,
        }:
            payload = wire.damaged(payload, self.chance)
        if frame.kind is FrameKind.CREDIT:
            payload = self.chance.choice(_EVERY_NUMBER).to_bytes(4, "little")
        flags = frame.flags if self.chance.random() < 0.7 else self.chance.randrange(256)
        return Frame(stream, frame.kind, flags, payload[: frames.MAX_PAYLOAD]).encoded()

    def _answer(self, stream: int) -> bytes:
        channel, message = self.chance.choice(_ANSWERS)
        body = message if isinstance(message, bytes) else message.SerializeToString()
        if self.chance.random() < 0.7:
            body = wire.damaged(body, self.chance)
        flags = channel << 1 | self.chance.choice((0, FrameFlag.END))
        return (
            Frame(stream, FrameKind.DATA, flags, body).encoded()
            + _DONE._replace(stream=stream).encoded()
        )

    def _wild(self) -> bytes:
        frame = self.chance.choice(self.frames)
        match self.chance.randrange(5):
            case 0:
                return wire.scrambled(frame.encoded(), self.chance)
            case 1:
                return frame.encoded()[: self.chance.randrange(40)]
            case 2:
                return self._header() + self.chance.randbytes(self.chance.randrange(80))
            case 3:
                length = self.chance.choice(_EVERY_NUMBER).to_bytes(4, "little")
                return length + frame.encoded()[4:]
            case _:
                return self.chance.randbytes(self.chance.randrange(1, 200))

    def _header(self) -> bytes:
        length, stream = self.chance.choice(_EVERY_NUMBER), self.chance.choice(_EVERY_NUMBER)
        kind = self.chance.choice([*FrameKind, 0, 0x7F, 0xFF])
        head = length.to_bytes(4, "little") + stream.to_bytes(4, "little")
        return head + bytes([kind, self.chance.randrange(256)])
