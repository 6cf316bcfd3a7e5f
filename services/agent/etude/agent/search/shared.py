"""The index of a set of files that many workspaces begin with: built once, at its first use."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from etude.agent.search.base import Base
    from etude.agent.search.vectors import Embedder


@dataclass(slots=True)
class SharedIndex:
    """Files, and their index as soon as somebody asks for it."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    embedder: "Embedder | None" = None
    """Unless given, the one that is always there."""
    _building: "asyncio.Task[Base] | None" = None

    async def get(self) -> "Base":
        """The index, built in a thread by whoever asks first.

        Raises:
            UnavailableError: there is no parser on this machine.
        """
        if self._building is None or _has_failed(self._building):
            building = asyncio.to_thread(_base, self.files, self.embedder)
            self._building = asyncio.create_task(building, name="search index")
        # Others wait for it too: whoever gives up does not end it.
        return await asyncio.shield(self._building)


def _base(files: Mapping[str, bytes], embedder: "Embedder | None") -> "Base":
    # A node that takes over leases has no time to spare, and most workspaces are never searched.
    from etude.agent.search.base import base  # noqa: PLC0415 - numpy costs 0.1 s of CPU

    return base(files, embedder)


def _has_failed(task: "asyncio.Task[Base]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
