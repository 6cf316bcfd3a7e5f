"""Index of the chunks of some files; immutable."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.agent.search import bm25
from etude.agent.search.bm25 import Postings
from etude.agent.search.chunks import Chunk, Piece, is_searched, pieces
from etude.agent.search.tokens import Passage, passage
from etude.agent.search.vectors import Bytes, Embedder, cosines

MAX_CHUNKS = 200_000
"""Limit of an index; chunks of the last files by path are left out."""
_EMBEDDED_AT_ONCE = 256


class Entry(NamedTuple):
    """One chunk with its word counts and its vector."""

    chunk: Chunk
    counts: Counter[str]
    vector: Bytes


class Matches(NamedTuple):
    """Scores of each chunk for a question."""

    words: NDArray[np.float64]
    meaning: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Chunks in the order of their paths and lines."""

    chunks: Sequence[Chunk]
    postings: Postings
    vectors: Bytes

    def matches(self, question: Passage, embedder: Embedder, known: Postings) -> Matches:
        """Scores of every chunk, in their order."""
        words = bm25.scores(self.postings, question.counts, known)
        meaning = cosines(self.vectors, embedder.embed_query(question))
        return Matches(words, np.where(meaning > embedder.floor, meaning, 0.0))


def entries(files: Mapping[str, bytes], embedder: Embedder) -> Iterator[Entry]:
    """The chunks of those files that are searched, in the order of their paths and lines.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    wanted = {
        path: files[path]
        for path in sorted(files, key=str.encode)
        if is_searched(path, files[path])
    }
    found = itertools.islice(pieces(wanted), MAX_CHUNKS)
    while some := list(itertools.islice(found, _EMBEDDED_AT_ONCE)):
        texts = [_passage(piece) for piece in some]
        rows = embedder.embed(texts)
        for piece, text, row in zip(some, texts, rows, strict=True):
            yield Entry(piece.chunk, text.counts, row)


def build(found: Iterable[Entry], num_components: int) -> Index:
    """Build an index of chunks that are in order."""
    held: list[Chunk] = []
    vectors = bytearray()

    def counted() -> Iterator[Counter[str]]:
        for entry in found:
            held.append(entry.chunk)
            vectors.extend(entry.vector.tobytes())
            yield entry.counts

    return Index(
        postings=bm25.postings(counted()),
        chunks=held,
        vectors=np.frombuffer(vectors, np.int8).reshape(len(held), num_components),
    )


def _passage(piece: Piece) -> Passage:
    """A chunk's text with its path above it, whose words count too."""
    return passage(f"{piece.chunk.path}\n{piece.text.decode('utf-8', 'replace')}")
