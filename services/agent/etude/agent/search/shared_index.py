"""Shared index of the files that many workspaces start with, built at its first use."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.agent.search.embedders.interface import Embedder
    from etude.agent.search.index import BaseIndex


@dataclass(slots=True)
class SharedIndex:
    """Files, and their index after the first request."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    embedder: "Embedder | None" = None
    """By default the hashed embedder."""
    _building: "asyncio.Task[BaseIndex] | None" = None

    async def get(self) -> "BaseIndex":
        """The index; the first call builds it in a thread.

        Raises:
            UnavailableError: there is no parser on this machine.
        """
        if self._building is None or _has_failed(self._building):
            building = asyncio.to_thread(_build_base_index, self.files, self.embedder)
            self._building = asyncio.create_task(building, name="search index")
        # Other callers wait for it too: a cancelled one must not end it.
        return await asyncio.shield(self._building)


def _build_base_index(files: Mapping[str, bytes], embedder: "Embedder | None") -> "BaseIndex":
    # A host that adopts leases must be fast, and most workspaces are never searched.
    from etude.agent.search.index import build_base_index  # noqa: PLC0415 - numpy costs 0.1 s of CPU

    return build_base_index(files, embedder)


def _has_failed(task: "asyncio.Task[BaseIndex]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
