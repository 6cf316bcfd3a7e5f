"""The index of a set of files that many workspaces begin with: built once, at its first use."""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from etude.agent.patterns import is_hidden
from etude.agent.search.hashed import HashedNull
from etude.agent.search.index import Index, build, entries
from etude.agent.search.vectors import Embedder


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What workspaces that differ in some files share."""

    embedder: Embedder
    index: Index
    digests: Mapping[str, bytes]
    """SHA-256 of every file that is not hidden, searched or not."""


@dataclass(slots=True)
class SharedIndex:
    """Files, and their index as soon as somebody asks for it."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    embedder: Embedder = field(default_factory=HashedNull)
    _building: asyncio.Task[Base] | None = None

    async def get(self) -> Base:
        """The index, built in a thread by whoever asks first.

        Raises:
            UnavailableError: there is no parser on this machine.
        """
        if self._building is None or _has_failed(self._building):
            building = asyncio.to_thread(base, self.files, self.embedder)
            self._building = asyncio.create_task(building, name="search index")
        # Others wait for it too: whoever gives up does not end it.
        return await asyncio.shield(self._building)


def base(files: Mapping[str, bytes], embedder: Embedder) -> Base:
    """The index of some files, now.

    Raises:
        UnavailableError: there is no parser on this machine.
    """
    return Base(
        embedder=embedder,
        index=build(entries(files, embedder), embedder.num_components),
        digests={path: digest(data) for path, data in files.items() if not is_hidden(path)},
    )


def digest(data: bytes) -> bytes:
    """Identity of a file's content."""
    return hashlib.sha256(data).digest()


def _has_failed(task: asyncio.Task[Base]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
