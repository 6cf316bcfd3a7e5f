"""Parser of unified diffs, as in `git apply`.

Two differences are for patches that a language model writes: the last newline may be missing, and
names may lack a/ and b/. Renames, copies, modes, links and binary patches are refused.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from etude.agent.tools.base import ToolError

_RANGE = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_OTHER = (
    *(b"rename ", b"copy ", b"similarity ", b"dissimilarity ", b"GIT binary", b"Binary files "),
    *(b"old mode ", b"new mode "),
)
_PLAIN_MODE = b"100644"
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abfnrtv"\\])')
_ESCAPES = {
    **dict(zip(b"abfnrtv", (bytes([n]) for n in b"\a\b\f\n\r\t\v"), strict=True)),
    **{n: bytes([n]) for n in b'"\\'},
}


class HunkLine(NamedTuple):
    """One line of a hunk."""

    sign: bytes
    """Space, minus or plus."""
    text: bytes
    """With its newline, if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One place of a file."""

    number: int
    """Line number of its start in the patch."""
    old_start: int
    new_start: int
    lines: tuple[HunkLine, ...]

    def side(self, sign: bytes) -> list[bytes]:
        """The lines before (minus) or after (plus) it."""
        return [line.text for line in self.lines if line.sign in (b" ", sign)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    """Changes of a patch to one file."""

    path: str
    is_new: bool
    is_deleted: bool
    hunks: tuple[Hunk, ...]

    @property
    def num_added(self) -> int:
        """Lines that it adds."""
        return sum(line.sign == b"+" for hunk in self.hunks for line in hunk.lines)

    @property
    def num_removed(self) -> int:
        """Lines that it removes."""
        return sum(line.sign == b"-" for hunk in self.hunks for line in hunk.lines)


def parse_diff(text: str) -> list[FilePatch]:
    """Parse the files of a patch; text around them is ignored.

    Raises:
        ToolError: it is not a patch, or needs an unsupported operation.
    """
    lines = split_lines(text.encode())
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    found = list(_DiffReader(lines).patches())
    if not found:
        raise ToolError("the patch names no file: begin with lines like --- a/PATH and +++ b/PATH")
    return found


def split_lines(data: bytes) -> list[bytes]:
    """The lines with their newlines; no other byte ends a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)


class _DiffReader:
    def __init__(self, lines: Sequence[bytes]) -> None:
        self._lines = lines
        self._at = 0

    def patches(self) -> Iterator[FilePatch]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith(b"diff --git "):
                yield self._git(line)
            elif line.startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
                yield self._plain(is_new=False, is_deleted=False)
            elif _RANGE.match(line):
                raise ToolError(
                    f"line {self._at + 1} of the patch: a hunk without a file before it"
                )
            else:
                self._at += 1

    def _git(self, header: bytes) -> FilePatch:
        is_new = is_deleted = False
        start = self._at
        self._at += 1
        while not self._peek().startswith((b"--- ", b"diff --git ", b"@@ ")):
            line = self._peek()
            if not line:
                break
            if line.startswith(_OTHER):
                raise ToolError(
                    f"line {self._at + 1} of the patch: {_excerpt(line)}: not supported"
                )
            if line.startswith((b"new file mode ", b"deleted file mode ")):
                is_new |= line.startswith(b"new")
                is_deleted |= line.startswith(b"deleted")
                if is_new and line.split()[-1] != _PLAIN_MODE:
                    raise ToolError(f"line {self._at + 1} of the patch: only files of mode 100644")
            self._at += 1
        if self._peek().startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
            return self._plain(is_new=is_new, is_deleted=is_deleted)
        path = _git_name(header)
        if path is None or not (is_new or is_deleted):
            raise ToolError(f"line {start + 1} of the patch: {_excerpt(header)}: nothing to do")
        return FilePatch(path=path, is_new=is_new, is_deleted=is_deleted, hunks=())

    def _plain(self, *, is_new: bool, is_deleted: bool) -> FilePatch:
        number = self._at + 1
        old, new = _name(self._peek()[4:], b"a/"), _name(self._peek(1)[4:], b"b/")
        self._at += 2
        if old is None and new is None:
            raise ToolError(f"line {number} of the patch: both names are /dev/null")
        if old is not None and new is not None and old != new:
            raise ToolError(
                f"line {number} of the patch: {old} and {new}: files are not renamed by patches"
            )
        hunks = tuple(self._hunks())
        if not hunks:
            raise ToolError(f"line {number} of the patch: no hunk, like @@ -1,3 +1,4 @@, follows")
        return FilePatch(
            path=(new if old is None else old) or "",
            is_new=is_new or old is None,
            is_deleted=is_deleted or new is None,
            hunks=hunks,
        )

    def _hunks(self) -> Iterator[Hunk]:
        while match := _RANGE.match(self._peek()):
            numbers = [int(group) if group is not None else 1 for group in match.groups()]
            start = self._at
            self._at += 1
            lines = tuple(self._body(start + 1, numbers[1], numbers[3]))
            if all(line.sign == b" " for line in lines):
                raise ToolError(f"line {start + 1} of the patch: the hunk changes nothing")
            yield Hunk(number=start + 1, old_start=numbers[0], new_start=numbers[2], lines=lines)

    def _body(self, number: int, old: int, new: int) -> Iterator[HunkLine]:
        while old > 0 or new > 0 or self._peek().startswith(b"\\ "):
            line = self._peek()
            sign, text = line[:1], line[1:]
            if line == b"\n":
                sign, text = b" ", line  # an empty line of context, as some editors leave it
            if sign == b"\\":
                self._at += 1
                continue
            old -= sign in (b" ", b"-")
            new -= sign in (b" ", b"+")
            if sign not in (b" ", b"-", b"+") or not line or old < 0 or new < 0:
                raise ToolError(
                    f"line {number} of the patch: the hunk does not have as many lines as it says"
                )
            self._at += 1
            ends_here = self._peek().startswith(b"\\ ")
            yield HunkLine(sign, text[:-1] if ends_here else text)

    def _peek(self, ahead: int = 0) -> bytes:
        at = self._at + ahead
        return self._lines[at] if at < len(self._lines) else b""


def _git_name(header: bytes) -> str | None:
    """Name of a file without hunks, which is in the first line twice."""
    names = header[len(b"diff --git ") :].strip()
    half = (len(names) - 1) // 2
    old, new = _name(names[:half], b"a/"), _name(names[half + 1 :], b"b/")
    return old if old == new else None


def _name(raw: bytes, prefix: bytes) -> str | None:
    """A file's name; None for no file.

    Raises:
        ToolError: the name is empty.
    """
    name = raw.split(b"\t")[0].rstrip(b"\r\n")
    if name == b"/dev/null":
        return None
    if name.startswith(b'"') and name.endswith(b'"') and len(name) > 1:
        name = _ESCAPE.sub(lambda found: _unescape(found[1]), name[1:-1])
    if not name.removeprefix(prefix):
        raise ToolError("the patch has a file without a name")
    return name.removeprefix(prefix).decode("utf-8", "replace")


def _unescape(code: bytes) -> bytes:
    return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _ESCAPES[code[0]]


def _excerpt(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip()[:200]
