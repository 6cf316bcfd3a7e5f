"""Replacing one exact piece of a file."""

import re
from typing import ClassVar, NamedTuple

from pydantic import Field
from typing_extensions import override

from etude.agent.tools import lints
from etude.agent.tools.base import Access, Tool, ToolError, ToolOutcome
from etude.agent.tools.truncate import truncate
from etude.agent.workspace import Workspace

_HUNK_CAP_BYTES = 8 << 10
_CONTEXT_LINES = 3
_SHOWN_LINES = 10
_WORD = re.compile(r"\w+")
_LIKENESS = 0.4
"""Share of common words from which another line is worth naming; below it the hint misleads."""
_COMPARED_LINES = 20_000


class NoMatchError(ToolError):
    """old_string does not stand in the file."""


class AmbiguousError(ToolError):
    """old_string stands in the file more than once."""


class Edited(NamedTuple):
    """A file's content after a replacement."""

    data: bytes
    starts: tuple[int, ...]
    """Where each replaced piece began in the old content."""
    old: bytes
    new: bytes


class SearchReplace(Tool):
    """Replace text in a file. old_string must match exactly, in one place only."""

    access: ClassVar[Access] = Access.WRITE
    path: str
    """File to change, relative to the workspace."""
    old_string: str = Field(min_length=1)
    """The text to replace, with its indentation and enough lines around it to be unique."""
    new_string: str
    """The text to put there."""
    replace_all: bool = False
    """Replace every place instead."""

    @property
    @override
    def target(self) -> str:
        return self.path

    @override
    async def run(self, workspace: Workspace) -> ToolOutcome:
        if self.old_string == self.new_string:
            raise ToolError("old_string and new_string are the same")
        before = await workspace.read(self.path)
        edited = replace(before, self.old_string, self.new_string, replace_all=self.replace_all)
        await workspace.write(self.path, edited.data)
        hunk = truncate(_hunk(before, edited), cap_bytes=_HUNK_CAP_BYTES, rest="read the file")
        found = await lints.after_edit(workspace, self.path, before, edited.data)
        places = f" in {len(edited.starts)} places" if len(edited.starts) > 1 else ""
        return ToolOutcome(
            content=f"Changed {self.path}{places}:\n{hunk.text}{found}",
            omitted_bytes=hunk.omitted_bytes,
        )


def replace(data: bytes, old_string: str, new_string: str, *, replace_all: bool = False) -> Edited:
    """Exact replacement; in a file that ends every line with CRLF, so do both strings.

    Raises:
        NoMatchError: naming the line that is most like it.
        AmbiguousError: naming the lines where it stands.
    """
    old, new = old_string.encode(), new_string.encode()
    if b"\r" not in old and data.count(b"\r\n") == data.count(b"\n") > 0:
        old, new = (part.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for part in (old, new))
    starts = _starts(data, old)
    if not starts:
        raise NoMatchError(f"old_string not found{nearest(data, old_string)}")
    if len(starts) > 1 and not replace_all:
        lines = [str(data.count(b"\n", 0, start) + 1) for start in starts[:_SHOWN_LINES]]
        more = ", …" if len(starts) > _SHOWN_LINES else ""
        raise AmbiguousError(
            f"old_string matches {len(starts)} times, at lines {', '.join(lines)}{more}:"
            " add lines around it, or set replace_all"
        )
    return Edited(data.replace(old, new), tuple(starts), old, new)


def _starts(data: bytes, old: bytes) -> list[int]:
    starts: list[int] = []
    at = data.find(old) if old else -1
    while at >= 0:
        starts.append(at)
        at = data.find(old, at + len(old))
    return starts


def nearest(data: bytes, old_string: str) -> str:
    """A hint at the line that shares most words with the first line looked for, or nothing."""
    sought = next((line.strip() for line in old_string.splitlines() if line.strip()), "")
    words = set(_WORD.findall(sought))
    best, best_number, best_line = _LIKENESS, 0, ""
    lines = data.decode("utf-8", "replace").split("\n", _COMPARED_LINES)[:_COMPARED_LINES]
    for number, line in enumerate(lines, 1):
        present = set(_WORD.findall(line[:1000]))
        likeness = len(words & present) / max(1, len(words | present))
        if likeness > best:
            best, best_number, best_line = likeness, number, line
    if not best_number:
        return ""
    return f"; the nearest line is {best_number}: {best_line.strip()[:200]}"


def _hunk(before: bytes, edited: Edited) -> str:
    """The first replaced place with lines around it, as in a unified diff."""
    start = edited.starts[0]
    first = before.rfind(b"\n", 0, start) + 1
    end = start + len(edited.old)
    last = before.find(b"\n", max(first, end - 1))
    last = len(before) if last < 0 else last
    removed = before[first:last]
    added = before[first:start] + edited.new + before[end:last] if end <= last else edited.new
    line = before.count(b"\n", 0, first) + 1
    above = before[:first].split(b"\n")[-_CONTEXT_LINES - 1 : -1]
    below = before[last + 1 :].removesuffix(b"\n").split(b"\n", _CONTEXT_LINES)[:_CONTEXT_LINES]
    rows = [*_rows(" ", above), *_rows("-", removed.split(b"\n"))]
    rows += [*_rows("+", added.split(b"\n")), *_rows(" ", below if below != [b""] else [])]
    return f"@@ line {line} @@\n" + "\n".join(rows)


def _rows(sign: str, lines: list[bytes]) -> list[str]:
    return [sign + line.decode("utf-8", "replace").removesuffix("\r") for line in lines]
