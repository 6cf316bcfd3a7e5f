r"""Truncation of long text in its middle, to the byte.

    head + "\n[... {lines} lines, {bytes} bytes omitted; {rest} ...]\n" + tail

The head gets a quarter of the cap and the tail the remainder, each cut back to a line boundary, or
to a whole character where a line is longer. The marker is part of what the policy sees, so a change
of it is a change of the policy's input.
"""

from typing import NamedTuple


class TruncatedText(NamedTuple):
    """A text within its cap."""

    text: str
    omitted_bytes: int = 0


class Dropped(NamedTuple):
    """Bytes and lines that were cut out of the middle before."""

    num_bytes: int = 0
    num_lines: int = 0


NOTHING = Dropped()


def truncate(
    text: str | bytes, *, cap_bytes: int, rest: str, dropped: Dropped = NOTHING
) -> TruncatedText:
    """The text, or its two ends when it is longer than the cap.

    Args:
        text: invalid UTF-8 becomes U+FFFD before anything is counted.
        cap_bytes: largest size of head and tail together.
        rest: how to get what is missing, for the policy.
        dropped: counted as omitted; the text's ends must be the true ones.
    """
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    data = shown.encode()
    if len(data) <= cap_bytes:
        return TruncatedText(shown, dropped.num_bytes)
    head = head_end(data, cap_bytes // 4)
    tail = tail_start(data, len(data) - (cap_bytes - cap_bytes // 4))
    omitted = tail - head + dropped.num_bytes
    lines = data.count(b"\n", head, tail) + dropped.num_lines
    marker = f"\n[... {lines} lines, {omitted} bytes omitted; {rest} ...]\n"
    return TruncatedText(data[:head].decode() + marker + data[tail:].decode(), omitted)


def head_end(data: bytes, limit: int) -> int:
    """End of a head of at most `limit` bytes: before a newline, or between two characters."""
    newline = data.rfind(b"\n", 0, limit + 1)
    return newline if newline > 0 else _previous_character(data, limit)


def tail_start(data: bytes, start: int) -> int:
    """First start of a tail from `start` on: after a newline, or at a character."""
    newline = data.find(b"\n", start - 1)
    return newline + 1 if 0 <= newline < len(data) - 1 else _next_character(data, start)


def _next_character(data: bytes, at: int) -> int:
    """The first position from here on at which a UTF-8 character starts."""
    while at < len(data) and data[at] & 0xC0 == 0x80:
        at += 1
    return at


def _previous_character(data: bytes, at: int) -> int:
    """The last position up to here at which a UTF-8 character starts."""
    while at > 0 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at
