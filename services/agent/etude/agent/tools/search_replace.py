"""Tool search_replace: replaces one exact piece of a file."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from pydantic import Field
from typing_extensions import override

from etude.agent.tools import lints
from etude.agent.tools.base import Access, Tool, ToolError, ToolOutcome
from etude.agent.tools.truncation import truncate
from etude.agent.workspace import Workspace

_HUNK_CAP_BYTES = 8 << 10
_CONTEXT_LINES = 3
_SHOWN_LINES = 10
_WORD = re.compile(r"\w+")
_LIKENESS = 0.4
"""Share of common words from which another line is worth naming; below it the hint misleads."""
_LIKENESS_OF_PAIRS = 0.45
_COMPARED_LINES, _COMPARED_CHARS = 20_000, 1000
_SHOWN_CHARS = 200


class NoMatchError(ToolError):
    """old_string is not in the file."""


class AmbiguousError(ToolError):
    """old_string is in the file more than once."""


class Edited(NamedTuple):
    """A file's content after a replacement."""

    data: bytes
    starts: tuple[int, ...]
    """Positions of the replaced pieces in the old content."""
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
        NoMatchError: names the line that is most like it.
        AmbiguousError: names the lines that hold it.
    """
    old, new = old_string.encode(), new_string.encode()
    if b"\r" not in old and data.count(b"\r\n") == data.count(b"\n") > 0:
        old, new = (part.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") for part in (old, new))
    starts = _starts(data, old)
    if not starts:
        raise NoMatchError(f"old_string not found{nearest_hint(data, old_string)}")
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


def nearest_hint(data: bytes, old_string: str) -> str:
    """Hint at the lines that are most like old_string; empty if none is.

    It names the first line that differs where the ones before it stand in the file; else the line
    that shares most words with the first one looked for, or most pairs of letters.
    """
    sought = [line.strip() for line in old_string.strip().splitlines()]
    lines = data.decode("utf-8", "replace").split("\n", _COMPARED_LINES)[:_COMPARED_LINES]
    shown = [line[:_COMPARED_CHARS].strip() for line in lines]
    if not sought:
        return ""
    starts = [at for at, line in enumerate(shown) if line == sought[0]]
    if starts:
        run, start = max((_matching_run(shown, start, sought), -start) for start in starts)
        at = run - start
        if run == len(sought):
            return f"; with other spaces it stands at line {1 - start}"
        there = shown[at][:_SHOWN_CHARS] if at < len(shown) else "(the end of the file)"
        return f"; line {run + 1} of it is not line {at + 1}: {there}"
    for parts, least in ((_word_set, _LIKENESS), (_letter_pairs, _LIKENESS_OF_PAIRS)):
        like = _most_like(parts, shown, sought[0], least)
        if like is not None:
            return f"; the nearest line is {like + 1}: {shown[like][:_SHOWN_CHARS]}"
    return ""


def _matching_run(shown: Sequence[str], start: int, sought: Sequence[str]) -> int:
    """Number of lines that agree from `start` on."""
    pairs = zip(shown[start : start + len(sought)], sought, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _most_like(
    parts: Callable[[str], set[str]], shown: Sequence[str], sought: str, least: float
) -> int | None:
    wanted = parts(sought)
    best, at = least, None
    for number, line in enumerate(shown):
        present = parts(line)
        likeness = len(wanted & present) / max(1, len(wanted | present))
        if likeness > best:
            best, at = likeness, number
    return at


def _word_set(line: str) -> set[str]:
    return set(_WORD.findall(line))


def _letter_pairs(line: str) -> set[str]:
    return {line[at : at + 2] for at in range(len(line) - 1)}


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
