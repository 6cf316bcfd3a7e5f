"""Path globs and text search in linear time for any pattern of the policy.

The engine is RE2: no look-around, no back-references, and no pattern that takes exponential time.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import re2  # type: ignore[import-untyped]  # google-re2 ships no type information

from etude.common.errors import EtudeError

MAX_SEARCHED_BYTES = 8 << 20
"""Larger files are left out of a search."""
_SNIFFED_BYTES = 8192
_BLOCK_LINES = 64
_MAX_CROSSING = 1000


class PatternError(EtudeError, ValueError):
    """A pattern does not parse; the text has the reason."""


class PatternMatcher(Protocol):
    """The part of a compiled RE2 pattern that is used here."""

    def search(self, text: bytes, /) -> object | None: ...
    def fullmatch(self, text: bytes, /) -> object | None: ...
    def finditer(self, text: bytes, /) -> Iterator[re.Match[bytes]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrepQuery:
    """A text search: pattern, files and limits."""

    pattern: str
    is_literal: bool = False
    path: str = ""
    """A file, or the folder to search."""
    globs: tuple[str, ...] = ()
    """Only paths that match one of these; a glob without a slash is matched against names."""
    ignore_case: bool = False
    multiline: bool = False
    """A match may cross lines, and `.` matches a newline; counts end at 1,000 matches a file."""
    before: int = 0
    after: int = 0
    """Lines of context to return around a match."""
    limit: int = 200
    """Matching lines to return; all are counted."""


class GrepLine(NamedTuple):
    """One line of a file that matches, or stands around a match."""

    number: int
    text: str
    is_match: bool


class FileMatches(NamedTuple):
    """Matches of one file."""

    path: str
    lines: tuple[GrepLine, ...]
    num_matches: int
    """Matching lines of the file, returned or not."""


def is_hidden(path: str) -> bool:
    """True if a segment of the path starts with a dot."""
    return path.startswith(".") or "/." in path


@functools.lru_cache(maxsize=256)
def glob_matcher(pattern: str) -> PatternMatcher:
    """Matches whole paths: `*` and `?` within a segment, `**` over segments, `[…]`, `{a,b}`.

    Raises:
        PatternError: the pattern is not a glob.
    """
    segments = pattern.removeprefix("./").split("/")
    parts = [_segment(segment) for segment in segments]
    expression = ""
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if part is None:
            expression += "(?:.*)" if is_last else "(?:[^/]+/)*"
        else:
            expression += part if is_last else part + "/"
    return _compile(f"(?s){expression}", pattern)


def names_hidden(pattern: str) -> bool:
    """True if a glob names segments that start with a dot."""
    return is_hidden(pattern.removeprefix("./"))


def grep_matcher(query: GrepQuery) -> PatternMatcher:
    """The query's pattern; `^` and `$` match at line ends.

    Raises:
        PatternError: the pattern is not an RE2 regular expression.
    """
    flags = "m" + "i" * query.ignore_case + "s" * query.multiline
    body = re.escape(query.pattern) if query.is_literal else query.pattern
    return _compile(f"(?{flags})(?:{body})", query.pattern)


def match_glob(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that match a glob, in their order.

    Raises:
        PatternError: the pattern is not a glob.
    """
    matcher, hidden = glob_matcher(pattern), names_hidden(pattern)
    return [p for p in paths if (hidden or not is_hidden(p)) and matcher.fullmatch(p.encode())]


def wants_hidden(query: GrepQuery) -> bool:
    """True if a query's globs name segments that start with a dot."""
    return any(names_hidden(glob) for glob in query.globs)


def is_searched(query: GrepQuery, start: str, path: str, size: int) -> bool:
    """True if a query that starts at this file or folder searches a file of this size."""
    if size > MAX_SEARCHED_BYTES:
        return False
    if start and path != start and not path.startswith(start + "/"):
        return False
    if is_hidden(path[len(start) :].lstrip("/")) and not wants_hidden(query):
        return False
    name = path.rpartition("/")[2]
    return not query.globs or any(
        glob_matcher(glob).fullmatch((path if "/" in glob else name).encode())
        for glob in query.globs
    )


def file_matches(
    matcher: PatternMatcher, query: GrepQuery, path: str, data: bytes
) -> FileMatches | None:
    """The lines of one file that match, without the limit; None for none and for binary files."""
    if b"\0" in data[:_SNIFFED_BYTES]:
        return None
    # A match in a line is a match in its block, unless the pattern anchors at the text's ends.
    has_ends = "\\A" in query.pattern or "\\z" in query.pattern
    if not has_ends and not matcher.search(data):
        return None
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    if query.multiline:
        hits = _multiline_matches(matcher, data)
    else:
        hits = _matching_lines(matcher, lines, block=1 if has_ends else _BLOCK_LINES)
    if not hits:
        return None
    return FileMatches(path, tuple(_with_context(lines, hits, query)), len(hits))


def limit_matches(found: Sequence[FileMatches], limit: int) -> list[FileMatches]:
    """The same matches, with the lines of the first `limit` matching lines only."""
    kept: list[FileMatches] = []
    for file in found:
        lines: list[GrepLine] = []
        for line in file.lines:
            if line.is_match and limit <= 0:
                break
            limit -= line.is_match
            lines.append(line)
        kept.append(file._replace(lines=tuple(lines) if any(x.is_match for x in lines) else ()))
    return kept


def _matching_lines(matcher: PatternMatcher, lines: Sequence[bytes], *, block: int) -> list[int]:
    """Matching lines; blocks without a match are skipped by one search."""
    hits: list[int] = []
    for start in range(0, len(lines), block):
        some = lines[start : start + block]
        if block == 1 or matcher.search(b"\n".join(some)):
            hits += [start + index for index, line in enumerate(some) if matcher.search(line)]
    return hits


def _multiline_matches(matcher: PatternMatcher, data: bytes) -> list[int]:
    hits: set[int] = set()
    line, at = 0, 0
    # Each match may scan all that follows, so their number is bounded: the policy chooses both.
    for match in itertools.islice(matcher.finditer(data), _MAX_CROSSING):
        line += data.count(b"\n", at, match.start())
        at = match.start()
        last = max(match.start(), match.end() - 1)
        hits.update(range(line, line + data.count(b"\n", at, last) + 1))
    return sorted(hits)


def _with_context(
    lines: Sequence[bytes], hits: Sequence[int], query: GrepQuery
) -> Iterator[GrepLine]:
    shown = -1
    matching = set(hits)
    for hit in hits:
        first = max(shown + 1, hit - query.before)
        for index in range(first, min(len(lines), hit + query.after + 1)):
            text = lines[index].decode("utf-8", "replace").removesuffix("\r")
            yield GrepLine(index + 1, text, index in matching)
            shown = index


def _segment(segment: str) -> str | None:
    """The expression of one path segment; None for `**`."""
    if segment == "**":
        return None
    parts = re.split(r"(\*+|\?|\[!?\]?[^\]]*\]|\{[^{}]*\})", segment)
    return "".join(_piece(part) for part in parts)


def _piece(part: str) -> str:
    if part.startswith("*"):
        return "[^/]*"
    if part == "?":
        return "[^/]"
    if part.startswith("[") and part.endswith("]") and len(part) > 2:
        letters = part[1:-1].replace("\\", "\\\\").replace("[", "\\[").replace("^", "\\^")
        return f"[^/{letters[1:]}]" if letters.startswith("!") else f"[{letters}]"
    if part.startswith("{") and part.endswith("}"):
        choices = [_segment(choice) or "[^/]*" for choice in part[1:-1].split(",")]
        return f"(?:{'|'.join(choices)})"
    return re.escape(part)


@functools.lru_cache(maxsize=256)
def _compile(expression: str, shown: str) -> PatternMatcher:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    try:
        compiled: PatternMatcher = re2.compile(expression.encode(), options=options)
    except re2.error as error:
        detail = error.args[0] if error.args else ""
        text = detail.decode("utf-8", "replace") if isinstance(detail, bytes) else str(detail)
        raise PatternError(f"{shown!r}: {text.partition(': ')[0]}") from error
    return compiled
