"""Engines of routes that are lent to a run: it samples on them while their users do without."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.weights import VersionId
from etude.trainer.controller.publishing.engine_client import EngineWeightClient
from etude.trainer.routing.table import EngineState
from etude.v1 import weights_pb2

POLL_S = 0.5
"""Interval of looks. Calls to an engine that was taken back meanwhile are refused, and go on
elsewhere."""


class LentEngine(NamedTuple):
    """An engine as it was seen last."""

    is_lent: bool = False
    live: VersionId | None = None
    """The version that it serves."""


@dataclass(slots=True)
class LentEngines:
    """Engines that a run may use and never commands: lent ones follow its newest version."""

    _clients: dict[str, EngineWeightClient] = field(default_factory=dict)
    _seen: dict[str, LentEngine] = field(default_factory=dict)
    """Those that were lent once, by target."""

    async def run(self, lenders: Callable[[], Sequence[str]]) -> None:
        """Look at the engines that may be lent, until cancelled."""
        while True:
            await self.look(lenders())
            await asyncio.sleep(POLL_S)

    async def look(self, targets: Sequence[str]) -> None:
        """Look at these engines once, and forget all others."""
        for target in self._clients.keys() - set(targets):
            self._seen.pop(target, None)
            await self._clients.pop(target).close()
        for target in targets:
            self._clients.setdefault(target, EngineWeightClient(target, POLL_S))
        statuses = await asyncio.gather(*(self._clients[each].status() for each in targets))
        for target, status in zip(targets, statuses, strict=True):
            found = LentEngine() if status is None else _read(status)
            if found.is_lent or target in self._seen:
                self._seen[target] = found

    def entries(self, newest: VersionId | None) -> Iterator[tuple[str, EngineState]]:
        """Target and state of each engine that was ever lent, for the routing table."""
        for target, engine in self._seen.items():
            if not engine.is_lent:
                yield target, EngineState.DRAINING
            else:
                is_live = newest is not None and engine.live == newest
                yield target, EngineState.LIVE if is_live else EngineState.LAGGING

    def num_live(self, newest: VersionId | None) -> int:
        """Number of engines that sample for the run now."""
        return sum(state is EngineState.LIVE for _, state in self.entries(newest))

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.close()


def _read(status: weights_pb2.WeightStatus) -> LentEngine:
    is_lent = status.lending == weights_pb2.LENDING_STATE_LENT
    live = VersionId.from_proto(status.live) if status.HasField("live") else None
    return LentEngine(is_lent, live)
