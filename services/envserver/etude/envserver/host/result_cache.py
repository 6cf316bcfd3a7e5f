"""Cache of test results by content: a run's same files and command are run once.

It is for drivers whose commands find nothing but their workspace and the template's programs, under
limits that are part of the key. A VM or a container has more: memory, services, other folders.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from etude.envserver import metrics
from etude.envserver.drivers.base import CommandOutcome

MAX_ENTRIES = 8_192
MAX_ENTRY_BYTES = 8 << 10

Compute = Callable[[], Awaitable[tuple[CommandOutcome, bool]]]
"""Runs the command; also tells if the outcome holds for everyone with the same key."""


@dataclass(slots=True)
class ResultCache:
    """Least recently used out first. Runs of one key at the same time share one execution."""

    max_entries: int = MAX_ENTRIES
    _kept: OrderedDict[str, CommandOutcome] = field(default_factory=OrderedDict)
    _running: dict[str, asyncio.Future[CommandOutcome | None]] = field(default_factory=dict)

    async def get(self, key: str, compute: Compute) -> CommandOutcome:
        """The outcome of the key, from the cache, from a run in progress, or from a new run."""
        found = self._kept.get(key)
        if found is None and key in self._running:
            found = await asyncio.shield(self._running[key])
        if key in self._kept:
            self._kept.move_to_end(key)
        if found is not None:
            metrics.cache_results.labels("hit").inc()
            return found
        metrics.cache_results.labels("miss").inc()
        return await self._run(key, compute)

    async def _run(self, key: str, compute: Compute) -> CommandOutcome:
        mine: asyncio.Future[CommandOutcome | None] = asyncio.get_running_loop().create_future()
        is_first = self._running.setdefault(key, mine) is mine
        shared: CommandOutcome | None = None
        try:
            outcome, is_general = await compute()
            if is_general and _is_repeatable(outcome):
                shared = outcome
                self._keep(key, outcome)
            return outcome
        finally:
            # Waiting callers run the command themselves if this run is not shareable.
            mine.set_result(shared)
            if is_first:
                del self._running[key]

    def _keep(self, key: str, outcome: CommandOutcome) -> None:
        self._kept[key] = outcome
        self._kept.move_to_end(key)
        while len(self._kept) > self.max_entries:
            self._kept.popitem(last=False)


def _is_repeatable(outcome: CommandOutcome) -> bool:
    size = len(outcome.output) + len(outcome.collected or b"")
    return not outcome.timed_out and not outcome.ended_for and size <= MAX_ENTRY_BYTES
