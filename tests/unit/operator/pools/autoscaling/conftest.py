"""A pool in a closed loop: what is decided is done, and takes its time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from etude.operator.pools.autoscaling.config import TICK_S, PoolScalingConfig
from etude.operator.pools.autoscaling.decide import decide_pool
from etude.operator.pools.autoscaling.provisioning import ProvisionTime
from etude.operator.pools.autoscaling.values import (
    DemandPlan,
    IdleReplica,
    PoolDecision,
    PoolMetrics,
    PoolState,
    initial_state,
)

TAKES_S = 20.0
GOING_S = 10.0


@dataclass
class Loop:
    """Replicas of one slot each, all of which take as long to be ready."""

    config: PoolScalingConfig
    demand: Callable[[float], int]
    """Environments that are held or waited for at a moment."""
    plans: Callable[[float], Sequence[DemandPlan]] = lambda _: ()
    holders: frozenset[str] = frozenset()
    took: ProvisionTime = field(default_factory=lambda: ProvisionTime(TAKES_S, TAKES_S))
    """What is known of how long replicas take, and how many fail."""
    now_s: float = 0.0
    state: PoolState = field(default_factory=lambda: initial_state(0, now_s=0.0))
    born_s: list[float] = field(default_factory=list)
    """Of each replica that is not on its way out."""
    gone_s: list[float] = field(default_factory=list)
    created: int = 0
    decisions: list[PoolDecision] = field(default_factory=list)

    @property
    def ready(self) -> int:
        return sum(self.now_s - born_s >= TAKES_S for born_s in self.born_s)

    def restart(self) -> None:
        """The operator forgets everything."""
        self.state = initial_state(len(self.born_s), now_s=self.now_s)

    def metrics(self) -> PoolMetrics:
        demand, ready = self.demand(self.now_s), self.ready
        leased = min(demand, ready)
        return PoolMetrics(
            seen_s=self.now_s,
            wall_s=self.now_s,
            ready=ready,
            creating=len(self.born_s) - ready,
            terminating=sum(self.now_s - gone_s < GOING_S for gone_s in self.gone_s),
            holding=leased,
            leased=leased,
            queued=demand - leased,
            holders=self.holders,
            idle=tuple(IdleReplica(f"r{n}", 0.0) for n in range(ready - leased)),
            provision=self.took,
        )

    def tick(self) -> PoolDecision:
        found = decide_pool(
            self.state, self.metrics(), self.plans(self.now_s), self.config, self.now_s
        )
        self.state = found.state
        for _ in range(found.withdrawn):
            self.born_s.pop()
            self.gone_s.append(self.now_s)
        for _ in found.victims:
            self.born_s.pop(0)
            self.gone_s.append(self.now_s)
        self.born_s += [self.now_s] * found.creates
        self.created += found.creates
        self.decisions.append(found)
        self.now_s += TICK_S
        return found

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.tick()


@pytest.fixture
def make_loop() -> type[Loop]:
    return Loop
