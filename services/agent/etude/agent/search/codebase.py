"""Code search over the present files of one workspace."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from etude.agent.search.chunks import MAX_FILE_BYTES, Chunk
from etude.agent.search.contents import FileContent, content_digest
from etude.agent.search.shared_index import SharedIndex

if TYPE_CHECKING:
    from etude.agent.search.overlay import Overlay

MAX_FILES = 20_000
MAX_BYTES = 64 << 20
"""Limits of a workspace that has no template to share with."""
MAX_CHANGED_FILES = 2_000
MAX_CHANGED_BYTES = 4 << 20
"""Limits of files that differ from the template, first by path: a policy chooses their number, and
each workspace keeps its own."""

Read = Callable[[str], Awaitable[bytes | None]]
"""Reads a file; None if it cannot be read."""


class SearchedFiles(NamedTuple):
    """The files of a workspace, for search."""

    digests: Mapping[str, bytes]
    """SHA-256 of every file that is not hidden."""
    read: Read


class SearchResult(NamedTuple):
    """Chunks that answer a question."""

    chunks: list[Chunk]
    """Best first."""
    backend: str
    """Id of the embedder."""
    num_skipped: int
    """Changed files beyond the limit, which were not searched."""


@dataclass(slots=True)
class Codebase:
    """The shared index of a workspace's template, and the changes since."""

    shared: SharedIndex = field(default_factory=SharedIndex)
    """Index of the template. A workspace that has little in common with it, because its files came
    with an image or there is no template, gets an index of its own at the first search."""
    _overlay: "Overlay | None" = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def search(
        self, files: SearchedFiles, question: str, folders: Collection[str], limit: int
    ) -> SearchResult:
        """The chunks that answer a question best.

        Raises:
            UnavailableError: there is no parser on this machine.
        """
        async with self._lock:
            if self._overlay is None:
                self._overlay = await self._new_overlay(files)
            overlay = self._overlay
            changed = overlay.changed(files.digests)
            fresh = await read_changed(files, changed, overlay.num_bytes)
            await asyncio.to_thread(overlay.update, files.digests, fresh)
            chunks = await asyncio.to_thread(overlay.search, question, folders, limit)
            return SearchResult(chunks, overlay.base.embedder.id, len(changed) - len(fresh))

    async def _new_overlay(self, files: SearchedFiles) -> "Overlay":
        shared = await self.shared.get()
        from etude.agent.search.overlay import Overlay  # noqa: PLC0415 - numpy, by now loaded

        overlay = Overlay(shared)
        if 2 * len(overlay.changed(files.digests)) <= len(files.digests):
            return overlay
        return Overlay(await (await self._own_index(files)).get())

    async def _own_index(self, files: SearchedFiles) -> SharedIndex:
        return SharedIndex(await read_contents(files), self.shared.embedder)


async def read_contents(files: SearchedFiles) -> dict[str, bytes]:
    """Read the files of a workspace, within the limits of an index of its own."""
    contents: dict[str, bytes] = {}
    left = MAX_BYTES
    for path in sorted(files.digests, key=str.encode)[:MAX_FILES]:
        data = await files.read(path) if left > 0 else None
        if data is not None:
            contents[path] = data
            left -= len(data)
    return contents


async def read_changed(
    files: SearchedFiles,
    changed: Collection[str],
    known_bytes: Callable[[str, bytes], int | None],
) -> dict[str, FileContent | None]:
    """Read the changed files within the limits.

    Args:
        files: of a workspace.
        changed: paths, in their order.
        known_bytes: size of a path with a digest whose content need not be read again.

    Returns:
        Content of each path that is searched; None for those that were not read.
    """
    found: dict[str, FileContent | None] = {}
    left = MAX_CHANGED_BYTES
    for path in changed:
        if len(found) == MAX_CHANGED_FILES or left <= 0:
            break
        size = known_bytes(path, files.digests[path])
        if size is None:
            data = await files.read(path) or b""
            kept = data if len(data) <= MAX_FILE_BYTES else b""
            found[path] = FileContent(content_digest(data), kept)
            size = len(kept)
        else:
            found[path] = None
        left -= size
    return found
