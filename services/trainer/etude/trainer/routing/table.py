"""Routing table: the engines that may be asked, and the load on each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class EngineState(Enum):
    """State of an engine in the routing table."""

    LIVE = "takes new calls"
    LAGGING = "serves an old version: running calls continue there, new ones go elsewhere"
    DRAINING = "leaves: running calls move elsewhere with what they have sampled"


class Purpose(Enum):
    """Purpose of a rollout; evaluations may have engines of their own."""

    TRAINING = "Training"
    EVALUATION = "Evaluation"


class EngineLoad(NamedTuple):
    """Calls in flight on one engine."""

    calls: int = 0
    """Those that run and those that queue."""
    tokens: int = 0
    """Their prompts and what they have sampled so far."""

    def cost(self, tokens_per_call: float) -> float:
        """Tokens in flight, with those that its calls are expected to sample yet."""
        return self.tokens + self.calls * tokens_per_call

    def plus(self, other: "EngineLoad") -> "EngineLoad":
        return EngineLoad(self.calls + other.calls, self.tokens + other.tokens)


Loads = Mapping[str, EngineLoad]
"""Load by target of an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """The engines of a run at one moment, as the controller knows them."""

    revision: int = 0
    """Higher is newer."""
    engines: tuple[tuple[str, EngineState], ...] = ()
    """Target (host:port) and state of each engine."""
    evaluation: frozenset[str] = frozenset()
    """Targets that serve evaluations and nothing else; empty: all engines serve both."""
    token_slots: int = 0
    """Completions that may be open at a time; 0 for no limit. A worker's table has its share."""

    def candidates(self, purpose: Purpose) -> tuple[str, ...]:
        """Targets that take new calls of a purpose; all live ones if its own are all away."""
        live = tuple(target for target, state in self.engines if state is EngineState.LIVE)
        if not self.evaluation:
            return live
        is_wanted = purpose is Purpose.EVALUATION
        own = tuple(target for target in live if (target in self.evaluation) == is_wanted)
        return own or live

    def usable(self) -> frozenset[str]:
        """Targets on which running calls may continue."""
        return frozenset(t for t, state in self.engines if state is not EngineState.DRAINING)


class RoutingUpdate(NamedTuple):
    """Update from the controller to one rollout worker."""

    table: RoutingTable
    other_loads: Loads
    """Load that the other rollout workers put on the engines."""


def sum_loads(loads: Iterable[Loads]) -> dict[str, EngineLoad]:
    """Sum of the loads of several rollout workers, by target."""
    total: dict[str, EngineLoad] = {}
    for each in loads:
        for target, load in each.items():
            total[target] = total.get(target, EngineLoad()).plus(load)
    return total
