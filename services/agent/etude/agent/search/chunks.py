"""Chunks of files, cut by a parser in a jailed worker process.

Covered: the worker is in the linter's jail (`etude.agent.jail`) with limits of its own on memory
and time, gets no environment and no paths, and its answers are checked; a file that crashes it is
cut into windows instead.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from etude.agent.patterns import is_hidden
from etude.agent.search.parsing.grammars import READY, grammar_of
from etude.agent.search.parsing.line_ranges import MAX_LINES, LineRange, windows
from etude.common.errors import UnavailableError

MAX_FILE_BYTES = 512 << 10
MAX_PARSED_BYTES = 128 << 10
"""Larger files are cut into windows; text that is not code takes a second at this size."""
MAX_PLAIN_BYTES = 128 << 10
"""Limit of files without a grammar: larger ones are data."""
_MIN_LINE_BYTES, _MAX_LINE_BYTES = 8, 400
"""Bounds of a file's mean line; outside of them it was written by a program."""
_SMALL_BYTES = 4096
_SNIFFED_BYTES = 8192
_BATCH_BYTES = 4 << 20
_TIMEOUT_S = 120.0
"""Limit of one batch; the worker's own budget normally ends a file long before."""
_MAX_DEATHS = 8
"""Crashed workers in one batch; the files after that are cut into windows."""
_COMMAND = ("-I", "-m", "etude.agent.search.parsing.worker")


class Chunk(NamedTuple):
    """Lines of a file, counted from 1; the last is part of it."""

    path: str
    start: int
    end: int


class ChunkText(NamedTuple):
    """A chunk with its lines."""

    chunk: Chunk
    text: bytes


class _Request(NamedTuple):
    grammar: str
    data: bytes


def is_searched(path: str, data: bytes) -> bool:
    """True if a file looks like text that people write and read."""
    if not data or is_hidden(path) or b"\0" in data[:_SNIFFED_BYTES]:
        return False
    limit = MAX_FILE_BYTES if grammar_of(path) else MAX_PLAIN_BYTES
    mean = len(data) / (data.count(b"\n") + 1)
    is_long = len(data) > _SMALL_BYTES and mean < _MIN_LINE_BYTES
    return len(data) <= limit and mean <= _MAX_LINE_BYTES and not is_long


def chunk_files(files: Mapping[str, bytes]) -> Iterator[ChunkText]:
    """The chunks of all files, each file's in the order of its lines.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    grammars = {p: grammar_of(p) for p in files if len(files[p]) <= MAX_PARSED_BYTES}
    spans = parse_line_ranges(
        _Request(name, files[path]) for path, name in grammars.items() if name
    )
    for path, data in files.items():
        yield from _chunk_file(path, data, next(spans) if grammars.get(path) else None)


def parse_line_ranges(requests: Iterable[_Request]) -> Iterator[list[LineRange] | None]:
    """Line ranges for each request in order; None if the parser gives none.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    batch: list[_Request] = []
    size = 0
    for request in requests:
        if batch and size + len(request.data) > _BATCH_BYTES:
            yield from _answers(batch)
            batch, size = [], 0
        batch.append(request)
        size += len(request.data)
    yield from _answers(batch)


def _answers(batch: Sequence[_Request]) -> Iterator[list[LineRange] | None]:
    done, deaths = 0, 0
    while done < len(batch) and deaths <= _MAX_DEATHS:
        rows = _run(batch[done:])
        for request, row in zip(batch[done:], rows, strict=False):
            yield _check_answer(row, request.data)
        done += len(rows)
        if done < len(batch):
            yield None  # the file that crashed the worker
            done += 1
            deaths += 1
    yield from (None for _ in batch[done:])


def _run(batch: Sequence[_Request]) -> list[bytes]:
    """The complete answers of one worker.

    Raises:
        UnavailableError: it cannot start.
    """
    frames = b"".join(f"{r.grammar} {len(r.data)}\n".encode() + r.data for r in batch)
    try:
        done = subprocess.run(
            [sys.executable, *_COMMAND],
            input=frames,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={},
            cwd="/",
        )
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        output, errors = error.stdout or b"", b""
    if not output.startswith(READY):
        why = errors.decode("utf-8", "replace").strip().rpartition("\n")[2] or "it printed nothing"
        raise UnavailableError(f"no parser runs here ({why}): pip install 'etude[envserver]'")
    rows = output.removeprefix(READY)
    return rows.split(b"\n")[: rows.count(b"\n")][: len(batch)]


def _check_answer(row: bytes, data: bytes) -> list[LineRange] | None:
    """Check an answer: line ranges in order that cover the file; None if they do not."""
    num_lines = _num_lines(data)
    try:
        found = [LineRange(*map(int, part.split(b":"))) for part in row.split()]
    except (TypeError, ValueError):
        return None
    at = 0
    for span in found:
        if not (span.start <= at <= span.end <= num_lines and 0 <= span.start < span.end):
            return None
        if span.end - span.start > MAX_LINES:
            return None
        at = span.end
    return found if at == num_lines else None


def _chunk_file(path: str, data: bytes, found: list[LineRange] | None) -> Iterator[ChunkText]:
    lines = data.split(b"\n")
    for span in found or windows(LineRange(0, _num_lines(data))):
        start, end = _without_blanks(span, lines)
        if start < end:
            yield ChunkText(Chunk(path, start + 1, end), b"\n".join(lines[start:end]))


def _without_blanks(span: LineRange, lines: Sequence[bytes]) -> LineRange:
    start, end = span
    while start < end and not lines[start].strip():
        start += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return LineRange(start, end)


def _num_lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n"))
