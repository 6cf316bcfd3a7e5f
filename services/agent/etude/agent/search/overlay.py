"""Overlay of changed files on a base index, which masks their old chunks.

The result is that of an index of the present files, except for the weights of words, which stay
those of the base: a search after an edit orders all other files as before.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from etude.agent.search import ranking
from etude.agent.search.chunks import Chunk
from etude.agent.search.contents import FileContent
from etude.agent.search.index import BaseIndex, ChunkIndex, IndexedChunk, build_index, index_chunks
from etude.agent.search.ranking import Postings
from etude.agent.search.tokens import count_words


class _Indexed(NamedTuple):
    digest: bytes
    num_bytes: int
    entries: Sequence[IndexedChunk]


class _View(NamedTuple):
    """Base and changed files as one list of chunks: the base's, then the changed ones'."""

    changed: ChunkIndex
    places: NDArray[np.int64]
    """Position of each chunk in the order of paths and lines."""
    present: NDArray[np.bool_]
    """True if the chunk is of a file as it is now."""


@dataclass(slots=True)
class Overlay:
    """The changes of one workspace. Not thread-safe."""

    base: BaseIndex
    known: Postings | None = None
    """Source of the weights of words; by default the base."""
    _indexed: dict[str, _Indexed] = field(default_factory=dict)
    _masked: frozenset[str] = frozenset()
    _view: _View | None = None

    def changed(self, digests: Mapping[str, bytes]) -> list[str]:
        """Files of a workspace that differ from the base, in the order of their paths."""
        known = self.base.digests
        paths = (path for path, digest in digests.items() if known.get(path) != digest)
        return sorted(paths, key=str.encode)

    def num_bytes(self, path: str, digest: bytes) -> int | None:
        """Size of a changed file that was read with this content before."""
        held = self._indexed.get(path)
        return held.num_bytes if held is not None and held.digest == digest else None

    def update(self, digests: Mapping[str, bytes], fresh: Mapping[str, FileContent | None]) -> None:
        """Follow the workspace's files.

        Args:
            digests: of all its files.
            fresh: the changed files to search; None for those that are indexed already.

        Raises:
            UnavailableError: there is no parser on this machine.
        """
        gone = {path for path in self.base.digests if path not in digests}
        masked = frozenset(gone.union(self.changed(digests)))
        contents = {path: content for path, content in fresh.items() if content is not None}
        kept = {path: held for path, held in self._indexed.items() if path in fresh}
        if masked != self._masked or kept.keys() != self._indexed.keys() or contents:
            self._view = None
        self._masked = masked
        self._indexed = kept | self._new(contents)

    def _new(self, contents: Mapping[str, FileContent]) -> dict[str, _Indexed]:
        by_path: dict[str, list[IndexedChunk]] = {path: [] for path in contents}
        files = {path: content.data for path, content in contents.items()}
        for entry in index_chunks(files, self.base.embedder):
            by_path[entry.chunk.path].append(entry)
        return {
            path: _Indexed(content.digest, len(content.data), by_path[path])
            for path, content in contents.items()
        }

    def search(self, question: str, folders: Collection[str], limit: int) -> list[Chunk]:
        """The chunks that answer a question best, best first.

        Args:
            question: text of the question.
            folders: files and folders to search; none: everywhere.
            limit: most chunks.
        """
        if self._view is None:
            self._view = self._new_view()
        view, base = self._view, self.base
        asked = count_words(question)
        parts = [
            index.score(asked, base.embedder, self.known or base.index.postings)
            for index in (base.index, view.changed)
        ]
        chunks = [*base.index.chunks, *view.changed.chunks]
        allowed = view.present & _inside(chunks, folders)
        orders = [
            ranking.rank_documents(np.where(allowed, np.concatenate(scores), 0.0), view.places)
            for scores in zip(*parts, strict=True)
        ]
        return [chunks[index] for index in ranking.fuse_ranks(orders, view.places, limit)]

    def _new_view(self) -> _View:
        paths = sorted(self._indexed, key=str.encode)
        found = [entry for path in paths for entry in self._indexed[path].entries]
        changed = build_index(found, self.base.embedder.num_components)
        chunks = [*self.base.index.chunks, *changed.chunks]
        keys = [(chunk.path.encode(), chunk.start, chunk.end) for chunk in chunks]
        places = np.empty(len(chunks), np.int64)
        places[sorted(range(len(chunks)), key=keys.__getitem__)] = np.arange(len(chunks))
        present = np.ones(len(chunks), np.bool_)
        masked = [i for i, c in enumerate(self.base.index.chunks) if c.path in self._masked]
        present[masked] = False
        return _View(changed, places, present)


def _inside(chunks: Sequence[Chunk], folders: Collection[str]) -> NDArray[np.bool_]:
    if not folders or "" in folders:
        return np.ones(len(chunks), np.bool_)
    below = tuple(folder + "/" for folder in folders)
    held = [c.path in folders or c.path.startswith(below) for c in chunks]
    return np.array(held, np.bool_)
