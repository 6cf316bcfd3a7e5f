"""Blocks of JSON-lines files: byte ranges of plain files, and whole compressed files."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import zstandard

from etude.common.blobs import Store
from etude.trainer.learner.data.encoding import refuse_row

MAX_LINE_BYTES = 64 << 20
"""Longest line: a file without line breaks must not fill the memory."""
MAX_EXPANDED_BYTES = 2 << 30
"""Most bytes that one compressed file may expand to."""
_TAIL_BYTES = 64 << 10
"""Read at a time beyond a block's end, until the line that crosses it ends."""


class JsonRow(NamedTuple):
    """One line, parsed."""

    value: object
    where: str
    """The file and the position of the line, for errors about it."""


def read_range(store: Store, key: str, size: int, *, start: int, length: int) -> Iterator[JsonRow]:
    """Read the lines that start within [start, start + length), to their ends.

    Raises:
        UserError: a line is not JSON, or too long.
        StoreError: the store does not answer.
    """
    # One byte before the block: if it ends a line, the block's first byte starts one.
    first = max(0, start - 1)
    end = min(size, start + length)
    data = store.get_range(key, first, end - first)
    if start:
        found = data.find(b"\n")
        if found < 0 or found + 1 == len(data):
            return  # no line starts here
        begin = found + 1
    else:
        begin = 0
    if not data.endswith(b"\n"):
        data += _read_tail(store, key, size, end, f"{store.url}/{key} byte {end}")
    at = first + begin
    for line in io.BytesIO(data[begin:]):
        yield from _parse(line, f"{store.url}/{key} byte {at}")
        at += len(line)


def read_compressed(store: Store, key: str) -> Iterator[JsonRow]:
    """Read all lines of a file that is compressed with gzip or zstd.

    Raises:
        UserError: it is damaged, expands too far, or a line is not JSON.
        StoreError: the store does not answer.
    """
    where = f"{store.url}/{key}"
    packed = io.BytesIO(store.get(key))
    if key.endswith(".gz"):
        stream: io.BufferedIOBase = gzip.GzipFile(fileobj=packed)
    else:
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        stream = io.BufferedReader(reader)
    expanded = 0
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            expanded += len(line)
            if len(line) > MAX_LINE_BYTES or expanded > MAX_EXPANDED_BYTES:
                refuse_row(f"{where} line {number}", "expands to too much; split the file")
            yield from _parse(line, f"{where} line {number}")
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as cause:
        refuse_row(where, f"is damaged: {cause}")


def _read_tail(store: Store, key: str, size: int, start: int, where: str) -> bytes:
    """The rest of the line that crosses a block's end."""
    tail = bytearray()
    while start + len(tail) < size:
        if len(tail) > MAX_LINE_BYTES:
            refuse_row(where, f"a line is longer than {MAX_LINE_BYTES >> 20} MiB")
        at = start + len(tail)
        piece = store.get_range(key, at, min(_TAIL_BYTES, size - at))
        found = piece.find(b"\n")
        if found >= 0:
            return bytes(tail + piece[: found + 1])
        tail += piece
    return bytes(tail)


def _parse(line: bytes, where: str) -> Iterator[JsonRow]:
    text = line.strip()
    if not text:
        return
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as cause:
        refuse_row(where, f"is not JSON: {cause}")
    yield JsonRow(value, where)
