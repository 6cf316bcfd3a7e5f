"""Index of the chunks of some files; immutable."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.agent.patterns import is_hidden
from etude.agent.search import ranking
from etude.agent.search.chunks import Chunk, Piece, is_searched, pieces
from etude.agent.search.contents import digest
from etude.agent.search.embedders.hashed import HashedNull
from etude.agent.search.embedders.interface import Bytes, Embedder, cosines
from etude.agent.search.ranking import Postings
from etude.agent.search.tokens import Passage, passage

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
        words = ranking.scores(self.postings, question.counts, known)
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
        postings=ranking.postings(counted()),
        chunks=held,
        vectors=np.frombuffer(vectors, np.int8).reshape(len(held), num_components),
    )


def _passage(piece: Piece) -> Passage:
    """A chunk's text with its path above it, whose words count too."""
    return passage(f"{piece.chunk.path}\n{piece.text.decode('utf-8', 'replace')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Index that workspaces with few changed files share."""

    embedder: Embedder
    index: Index
    digests: Mapping[str, bytes]
    """SHA-256 of every file that is not hidden, searched or not."""


def base(files: Mapping[str, bytes], embedder: Embedder | None) -> Base:
    """Build the index of some files; by default with the hashed embedder.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    embedder = embedder or HashedNull()
    return Base(
        embedder=embedder,
        index=build(entries(files, embedder), embedder.num_components),
        digests={path: digest(data) for path, data in files.items() if not is_hidden(path)},
    )
