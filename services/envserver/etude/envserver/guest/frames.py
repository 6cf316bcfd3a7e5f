"""Frames of the byte stream between a host and a guest, parsed from a peer that may be hostile.

A frame is `len u32 | stream u32 | type u8 | flags u8 | payload`, little-endian; len counts what
follows itself. No length of a peer is trusted with an allocation: a reader holds one frame at most.
"""

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import NamedTuple

from etude.common.errors import EtudeError

MAX_PAYLOAD = 64 << 10
MIN_LENGTH = 6
MAX_LENGTH = MIN_LENGTH + MAX_PAYLOAD
WINDOW = 256 << 10
"""Bytes of DATA that each side may send on a new stream before it is given more credit."""
MAX_CREDIT = 1 << 31
MAX_CALL_BYTES = 256 << 10
"""Longest CALL, over all of its frames."""
MAX_PING_BYTES = 64
MAGIC = b"ETUDE-RESET-v1\r\n"
NONCE_BYTES = 16
_RESET = struct.Struct("<16s16sQ")
_EPOCH = struct.Struct("<Q")
_HEADER = struct.Struct("<IIBB")
_LENGTH = struct.Struct("<I")
PADDING = bytes(MAX_LENGTH)
"""Completes any frame that a guest has read in part; the next length is then 0, which no frame
has."""


class FrameKind(IntEnum):
    """Type of a frame."""

    HELLO = 0x01
    RESET = 0x02
    RESET_ACK = 0x03
    SYNC = 0x04
    SYNC_ACK = 0x05
    PING = 0x06
    PONG = 0x07
    CALL = 0x10
    RESULT = 0x11
    DATA = 0x12
    CREDIT = 0x13
    CANCEL = 0x14
    SIGNAL = 0x15
    EVENT = 0x20


class FrameFlag(IntFlag):
    """Bits whose meaning depends on the kind of frame."""

    END = 0x01
    """DATA: the channel's last."""
    MORE = 0x01
    """CALL: goes on in the stream's next CALL."""
    REPLAYED = 0x01
    """RESULT: an earlier call's with the same id."""
    NOT_KEPT = 0x02
    """RESULT: that call's DATA was too long to be kept."""


FROM_GUEST = frozenset(
    {
        *(FrameKind.HELLO, FrameKind.RESET_ACK, FrameKind.SYNC_ACK, FrameKind.PING, FrameKind.PONG),
        *(FrameKind.RESULT, FrameKind.DATA, FrameKind.CREDIT, FrameKind.EVENT),
    }
)
FROM_HOST = frozenset(
    {
        *(FrameKind.RESET, FrameKind.SYNC, FrameKind.PING, FrameKind.PONG),
        *(FrameKind.CALL, FrameKind.DATA, FrameKind.CREDIT, FrameKind.CANCEL, FrameKind.SIGNAL),
    }
)
_ON_STREAMS = frozenset(
    {
        *(
            FrameKind.CALL,
            FrameKind.RESULT,
            FrameKind.DATA,
            FrameKind.CREDIT,
            FrameKind.CANCEL,
            FrameKind.SIGNAL,
        ),
    }
)
_SIZES = {
    FrameKind.RESET: (_RESET.size, _RESET.size),
    FrameKind.RESET_ACK: (NONCE_BYTES + _EPOCH.size, MAX_PAYLOAD),
    FrameKind.PING: (0, MAX_PING_BYTES),
    FrameKind.PONG: (0, MAX_PING_BYTES),
    FrameKind.CREDIT: (4, 4),
    FrameKind.CANCEL: (0, 0),
    FrameKind.SIGNAL: (4, 4),
}


class BadFrameError(EtudeError):
    """Bytes that break the protocol."""


class Frame(NamedTuple):
    """One frame."""

    stream: int
    kind: FrameKind
    flags: int = 0
    payload: bytes = b""

    @property
    def channel(self) -> int:
        """Of DATA: 0 is a file or an input, 1 and 2 are outputs."""
        return self.flags >> 1 & 3

    def encoded(self) -> bytes:
        header = _HEADER.pack(MIN_LENGTH + len(self.payload), self.stream, self.kind, self.flags)
        return header + self.payload


def reset_frame(nonce: bytes, epoch: int) -> Frame:
    """Frame that begins an epoch."""
    return Frame(0, FrameKind.RESET, 0, _RESET.pack(MAGIC, nonce, epoch))


def reset_ack_frame(nonce: bytes, epoch: int, body: bytes) -> Frame:
    """Frame that answers a RESET."""
    return Frame(0, FrameKind.RESET_ACK, 0, nonce + _EPOCH.pack(epoch) + body)


class ResetFields(NamedTuple):
    """Fields that RESET and RESET_ACK share."""

    nonce: bytes
    epoch: int
    body: bytes


def reset_fields(frame: Frame) -> ResetFields:
    """The parts of a RESET or a RESET_ACK."""
    payload = frame.payload.removeprefix(MAGIC) if frame.kind is FrameKind.RESET else frame.payload
    nonce, rest = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
    return ResetFields(nonce, _EPOCH.unpack_from(rest)[0], rest[_EPOCH.size :])


def credit_frame(stream: int, num_bytes: int) -> Frame:
    """Frame that permits more DATA."""
    return Frame(stream, FrameKind.CREDIT, 0, _LENGTH.pack(num_bytes))


def frame_number(frame: Frame) -> int:
    """The u32 of a CREDIT or a SIGNAL."""
    return int(_LENGTH.unpack(frame.payload)[0])


@dataclass(slots=True)
class FrameParser:
    """Parser of the frames of one kind of peer; can seek the next RESET or its answer."""

    kinds: Collection[FrameKind]
    """Kinds that this peer may send."""
    _held: bytearray = field(default_factory=bytearray)
    _seek: Callable[[], Frame | None] | None = None
    _nonce: bytes = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Take them all before feeding more.

        Raises:
            BadFrameError: the bytes are invalid; seek before going on.
        """
        self._held += data
        while True:
            frame = self._seek() if self._seek else self._cut()
            if frame is None:
                return
            yield frame

    def drop(self) -> None:
        """Forget all bytes, as after a lost connection."""
        self._held.clear()
        self._seek = None

    def seek_reset(self) -> None:
        """Discard everything up to the magic of a RESET, which may be held already."""
        self._seek = self._found_reset

    def seek_ack(self, nonce: bytes) -> None:
        """Discard everything up to the RESET_ACK with this nonce."""
        self._held.clear()
        self._nonce = nonce
        self._seek = self._found_ack

    def _cut(self) -> Frame | None:
        if len(self._held) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._held)
        if not MIN_LENGTH <= length <= MAX_LENGTH:
            raise BadFrameError(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        if len(self._held) < end:
            return None
        _, stream, kind, flags = _HEADER.unpack_from(self._held)
        payload = bytes(self._held[_HEADER.size : end])
        checked = self._checked(stream, kind, flags, payload)
        del self._held[:end]
        return checked

    def _checked(self, stream: int, kind: int, flags: int, payload: bytes) -> Frame:
        if kind not in self.kinds:
            raise BadFrameError(f"a frame of type {kind:#x}")
        known = FrameKind(kind)
        low, high = _SIZES.get(known, (0, MAX_PAYLOAD))
        if not low <= len(payload) <= high:
            raise BadFrameError(f"{known.name} with {len(payload)} bytes")
        if (stream > 0) is not (known in _ON_STREAMS):
            raise BadFrameError(f"{known.name} on stream {stream}")
        if known is FrameKind.RESET and not payload.startswith(MAGIC):
            raise BadFrameError("RESET without its magic")
        return Frame(stream, known, flags, payload)

    def _found_reset(self) -> Frame | None:
        at = self._held.find(MAGIC)
        if at < 0:
            del self._held[: max(0, len(self._held) - len(MAGIC) + 1)]
            return None
        del self._held[:at]
        if len(self._held) < _RESET.size:
            return None
        payload = bytes(self._held[: _RESET.size])
        del self._held[: _RESET.size]
        self._seek = None
        return Frame(0, FrameKind.RESET, 0, payload)

    def _found_ack(self) -> Frame | None:
        while (at := self._held.find(self._nonce)) >= 0:
            start = at - _HEADER.size
            if start < 0 or not _is_ack(self._held[start:at]):
                del self._held[: at + 1]
                continue
            del self._held[:start]
            frame = self._cut()
            if frame is not None:
                self._seek = None
            return frame
        del self._held[: max(0, len(self._held) - _HEADER.size - NONCE_BYTES + 1)]
        return None


def _is_ack(header: bytes | bytearray) -> bool:
    length, stream, kind, flags = _HEADER.unpack(header)
    smallest = MIN_LENGTH + _SIZES[FrameKind.RESET_ACK][0]
    fits = smallest <= length <= MAX_LENGTH
    return fits and (stream, kind, flags) == (0, FrameKind.RESET_ACK, 0)
