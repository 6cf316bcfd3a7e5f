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
from etude.agent.search.chunks import Chunk, ChunkText, chunk_files, is_searched
from etude.agent.search.contents import content_digest
from etude.agent.search.embedders.hashed import HashedEmbedder
from etude.agent.search.embedders.interface import Bytes, Embedder, cosines
from etude.agent.search.ranking import Postings
from etude.agent.search.tokens import Passage, count_words

MAX_CHUNKS = 200_000
"""Limit of an index; chunks of the last files by path are left out."""
_EMBEDDED_AT_ONCE = 256


class IndexedChunk(NamedTuple):
    """One chunk with its word counts and its vector."""

    chunk: Chunk
    counts: Counter[str]
    vector: Bytes


class ChunkScores(NamedTuple):
    """Scores of each chunk for a question."""

    words: NDArray[np.float64]
    meaning: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkIndex:
    """Chunks in the order of their paths and lines."""

    chunks: Sequence[Chunk]
    postings: Postings
    vectors: Bytes

    def score(self, question: Passage, embedder: Embedder, known: Postings) -> ChunkScores:
        """Scores of every chunk, in their order."""
        words = ranking.bm25_scores(self.postings, question.counts, known)
        meaning = cosines(self.vectors, embedder.embed_query(question))
        return ChunkScores(words, np.where(meaning > embedder.floor, meaning, 0.0))


def index_chunks(files: Mapping[str, bytes], embedder: Embedder) -> Iterator[IndexedChunk]:
    """The chunks of those files that are searched, in the order of their paths and lines.

    Chunks above the embedder's limit have zeros for a vector: words alone find them.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    wanted = {
        path: files[path]
        for path in sorted(files, key=str.encode)
        if is_searched(path, files[path])
    }
    found = itertools.islice(chunk_files(wanted), MAX_CHUNKS)
    left = embedder.max_texts
    while some := list(itertools.islice(found, _EMBEDDED_AT_ONCE)):
        texts = [_passage(piece) for piece in some]
        rows = np.zeros((len(some), embedder.num_components), np.int8)
        rows[:left] = embedder.embed(texts[:left])
        left = max(0, left - len(some))
        for piece, text, row in zip(some, texts, rows, strict=True):
            yield IndexedChunk(piece.chunk, text.counts, row)


def build_index(found: Iterable[IndexedChunk], num_components: int) -> ChunkIndex:
    """Build an index of chunks that are in order."""
    held: list[Chunk] = []
    vectors = bytearray()

    def counted() -> Iterator[Counter[str]]:
        for entry in found:
            held.append(entry.chunk)
            vectors.extend(entry.vector.tobytes())
            yield entry.counts

    return ChunkIndex(
        postings=ranking.build_postings(counted()),
        chunks=held,
        vectors=np.frombuffer(vectors, np.int8).reshape(len(held), num_components),
    )


def _passage(piece: ChunkText) -> Passage:
    """A chunk's text with its path above it, whose words count too."""
    return count_words(f"{piece.chunk.path}\n{piece.text.decode('utf-8', 'replace')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseIndex:
    """Index that workspaces with few changed files share."""

    embedder: Embedder
    index: ChunkIndex
    digests: Mapping[str, bytes]
    """SHA-256 of every file that is not hidden, searched or not."""


def build_base_index(files: Mapping[str, bytes], embedder: Embedder | None) -> BaseIndex:
    """Build the index of some files; by default with the hashed embedder.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    embedder = embedder or HashedEmbedder()
    return BaseIndex(
        embedder=embedder,
        index=build_index(index_chunks(files, embedder), embedder.num_components),
        digests={path: content_digest(data) for path, data in files.items() if not is_hidden(path)},
    )
