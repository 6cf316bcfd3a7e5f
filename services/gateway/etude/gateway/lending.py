"""Engines of users that are lent to the run's rollouts: those that the forecast leaves over."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from etude.common.api.route.spec import EngineLending
from etude.common.demand import units_needed
from etude.gateway import metrics
from etude.gateway.upstream import EngineFleet
from etude.v1 import weights_pb2, weights_pb2_grpc

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval of decisions: a burst of users is noticed within it."""
LOOK_S = 1.0
"""An engine that takes longer to answer is neither lent nor recalled: its loan ends by itself."""
LOAN_S = 10
"""Engines come back by themselves when no gateway has repeated a loan for so long."""

_AWAY = frozenset((weights_pb2.LENDING_STATE_EMPTYING, weights_pb2.LENDING_STATE_LENT))


def engines_needed(
    loads: Sequence[weights_pb2.WeightStatus], rules: EngineLending, num_engines: int
) -> int:
    """Engines that users need by the load of the last minutes, with a margin.

    Each engine's own peak counts, as if all were of one moment. An engine that has just started has
    seen too little to tell: then all are needed.

    Args:
        loads: of the engines that answer.
        rules: of the route.
        num_engines: of the channel.
    """
    if any(each.observed_seconds < rules.window_seconds for each in loads):
        return num_engines
    peak = sum(each.user_turns_peak for each in loads)
    needed = math.ceil(units_needed(peak) / rules.turns_per_engine)
    return min(num_engines, max(rules.min_replicas, needed))


def choose_lent(
    statuses: Mapping[str, weights_pb2.WeightStatus | None], rules: EngineLending
) -> frozenset[str]:
    """Engines to lend: all that answer but as many as users need, the first ones.

    Every gateway decides the same, as the engines know the load of all.

    Args:
        statuses: by target, in the order of the channel's engines; None for those without answer.
        rules: of the route.
    """
    answering = {target: status for target, status in statuses.items() if status is not None}
    needed = engines_needed(list(answering.values()), rules, len(statuses))
    return frozenset([*answering][needed:])


@dataclass(slots=True)
class EngineLender:
    """Lends engines of the stable channel, and takes them back before users need them."""

    rules: EngineLending
    stubs: "Mapping[str, weights_pb2_grpc.WeightServiceAsyncStub]"
    """Of the channel's engines, by target."""
    fleets: Sequence[EngineFleet]
    """Those that turns are sent to."""
    _lent: frozenset[str] = field(default_factory=frozenset)

    async def run(self) -> None:
        """Decide and act, for ever."""
        while True:
            await self.step()
            await asyncio.sleep(POLL_S)

    async def step(self) -> None:
        """Look at all engines once, and lend or recall what the forecast says."""
        found = await asyncio.gather(*map(_read_status, self.stubs.values()))
        statuses = dict(zip(self.stubs, found, strict=True))
        lent = choose_lent(statuses, self.rules)
        if lent != self._lent:
            log.info("%d of %d engines are lent", len(lent), len(statuses))
        self._lent = lent
        # Turns go elsewhere before an engine refuses them, and come back once it takes them.
        away = {target for target, each in statuses.items() if each and _is_away(each)}
        for fleet in self.fleets:
            fleet.lent = lent | away
        orders = dict.fromkeys(lent, LOAN_S)
        orders |= {
            target: 0
            for target, each in statuses.items()
            if each and each.lending in _AWAY and target not in lent
        }
        await asyncio.gather(*(_order(self.stubs[each], s) for each, s in orders.items()))
        metrics.LENT_ENGINES.set(sum(each is not None and _is_lent(each) for each in found))
        metrics.NEEDED_ENGINES.set(len(statuses) - len(lent))


def _is_away(status: weights_pb2.WeightStatus) -> bool:
    return status.lending not in {
        weights_pb2.LENDING_STATE_UNSPECIFIED,
        weights_pb2.LENDING_STATE_SERVING,
    }


def _is_lent(status: weights_pb2.WeightStatus) -> bool:
    return status.lending == weights_pb2.LENDING_STATE_LENT


async def _read_status(
    engine: "weights_pb2_grpc.WeightServiceAsyncStub",
) -> weights_pb2.WeightStatus | None:
    """Read the status of an engine; None if it does not answer."""
    try:
        answer = await engine.GetWeightStatus(weights_pb2.GetWeightStatusRequest(), timeout=LOOK_S)
    except grpc.aio.AioRpcError:
        return None
    return answer.status


async def _order(engine: "weights_pb2_grpc.WeightServiceAsyncStub", seconds: int) -> None:
    """Lend an engine for some seconds, or recall it; one that is away is asked again later."""
    request = weights_pb2.SetLendingRequest(seconds=seconds)
    try:
        await engine.SetLending(request, timeout=LOOK_S)
    except grpc.aio.AioRpcError as error:
        log.warning("an engine is not lent or recalled: %s", error.details())
