r"""Cutting the middle out of long text, to the byte.

    head + "\n[... {lines} lines, {bytes} bytes omitted; {rest} ...]\n" + tail

The head gets a quarter of the cap and the tail the remainder, each cut back to a line boundary, or
to a whole character where a line is longer. The marker is part of what the policy sees, so a change
of it is a change of the policy's input.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class Cut(NamedTuple):
    """A text within its cap."""

    text: str
    omitted_bytes: int = 0


class Dropped(NamedTuple):
    """What was left out of the middle before the text came here."""

    num_bytes: int = 0
    num_lines: int = 0


NOTHING = Dropped()


def truncate(text: str | bytes, *, cap_bytes: int, rest: str, dropped: Dropped = NOTHING) -> Cut:
    """The text, or its two ends when it is longer than the cap.

    Args:
        text: bytes that are no UTF-8 become U+FFFD before anything is counted.
        cap_bytes: largest size of head and tail together.
        rest: how to get what is missing, for the policy.
        dropped: counted as omitted; the text's ends must be the true ones.
    """
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    data = shown.encode()
    if len(data) <= cap_bytes:
        return Cut(shown, dropped.num_bytes)
    head = _head_end(data, cap_bytes // 4)
    tail = _tail_start(data, len(data) - (cap_bytes - cap_bytes // 4))
    omitted = tail - head + dropped.num_bytes
    lines = data.count(b"\n", head, tail) + dropped.num_lines
    marker = f"\n[... {lines} lines, {omitted} bytes omitted; {rest} ...]\n"
    return Cut(data[:head].decode() + marker + data[tail:].decode(), omitted)


@dataclass(slots=True)
class Tape:
    """The first and last bytes of a stream of any length, in bounded memory."""

    head_bytes: int = 256 << 10
    tail_bytes: int = 768 << 10
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)
    _dropped: Dropped = NOTHING

    def add(self, chunk: bytes) -> None:
        """Take the next bytes of the stream."""
        room = self.head_bytes - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * self.tail_bytes:
            self._drop(len(self._tail) - self.tail_bytes)

    def finish(self) -> Dropped:
        """Cut to size at whole characters and say what is missing; `output` is then final."""
        if self._dropped.num_bytes or len(self._tail) > self.tail_bytes:
            self._drop(_next_character(self._tail, max(0, len(self._tail) - self.tail_bytes)))
            kept = _previous_character(self._head, len(self._head))
            self._dropped = self._dropped._replace(
                num_bytes=self._dropped.num_bytes + len(self._head) - kept
            )
            del self._head[kept:]
        return self._dropped

    @property
    def output(self) -> bytes:
        """What was kept, both ends joined."""
        return bytes(self._head + self._tail)

    def _drop(self, count: int) -> None:
        num_lines = self._tail.count(b"\n", 0, count)
        self._dropped = Dropped(
            self._dropped.num_bytes + count, self._dropped.num_lines + num_lines
        )
        del self._tail[:count]


def _head_end(data: bytes, limit: int) -> int:
    newline = data.rfind(b"\n", 0, limit + 1)
    return newline if newline > 0 else _previous_character(data, limit)


def _tail_start(data: bytes, start: int) -> int:
    newline = data.find(b"\n", start - 1)
    return newline + 1 if 0 <= newline < len(data) - 1 else _next_character(data, start)


def _next_character(data: bytes | bytearray, at: int) -> int:
    """The first position from here on at which a UTF-8 character starts."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def _previous_character(data: bytes | bytearray, at: int) -> int:
    """The last position up to here at which no UTF-8 character is cut, however data goes on."""
    lead = at - 1
    while lead >= max(0, at - 3) and data[lead] & 0xC0 == 0x80:
        lead -= 1
    if lead < 0 or data[lead] < 0xC0:
        return at
    size = 2 if data[lead] < 0xE0 else 3 if data[lead] < 0xF0 else 4
    return at if lead + size <= at else lead
