"""Application of hunks to files as in `git apply`: exact, though the lines may have moved.

In a file that ends every line with CRLF, so do the patch's lines.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etude.agent.tools.base import ToolError
from etude.agent.tools.unified_diff import FilePatch, Hunk, split_lines


class MismatchError(ToolError):
    """A hunk does not match the file."""

    def __init__(self, patch: FilePatch, hunk: Hunk) -> None:
        number = patch.hunks.index(hunk) + 1
        where = f"hunk {number} of {patch.path} (line {hunk.number} of the patch)"
        super().__init__(f"{where} does not match the file")
        self.before = b"".join(hunk.side(b"-"))


class _FileLine(NamedTuple):
    """A line of the file while hunks are applied."""

    text: bytes
    is_patched: bool = False
    """No later hunk may change it or lean on it."""


def apply_hunks(patch: FilePatch, before: bytes) -> bytes:
    """Apply all hunks to a file's content.

    Raises:
        MismatchError: one does not match.
    """
    lines = [_FileLine(line) for line in split_lines(before)]
    has_crlf = before.count(b"\r\n") == before.count(b"\n") > 0
    for hunk in patch.hunks:
        old, new = hunk.side(b"-"), hunk.side(b"+")
        if has_crlf and not any(b"\r" in line for line in old):
            old, new = ([line.replace(b"\n", b"\r\n") for line in side] for side in (old, new))
        at = _place(lines, old, hunk)
        if at is None:
            raise MismatchError(patch, hunk)
        lines[at : at + len(old)] = [_FileLine(line, is_patched=True) for line in new]
    return b"".join(line.text for line in lines)


def _place(lines: Sequence[_FileLine], old: Sequence[bytes], hunk: Hunk) -> int | None:
    """Position of the old lines that is nearest to the hunk's own."""
    is_first, is_last = hunk.old_start <= 1, hunk.lines[-1].sign != b" "
    end = len(lines) - len(old)
    start = max(0, hunk.new_start - 1)
    if is_first:
        start = 0
    elif is_last:
        start = end
    if not 0 <= start <= len(lines):
        start = len(lines)
    for at in _positions_by_distance(start, len(lines)):
        if (is_first and at) or (is_last and at != end) or at > end:
            continue
        if all(there == (text, False) for there, text in zip(lines[at:], old, strict=False)):
            return at
    return None


def _positions_by_distance(start: int, end: int) -> Iterator[int]:
    """All places from 0 to the end, the nearest first, later ones before earlier ones."""
    yield start
    for distance in range(1, end + 1):
        if start + distance <= end:
            yield start + distance
        if start - distance >= 0:
            yield start - distance
