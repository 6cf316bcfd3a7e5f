"""What sizes a simulated pool: a fixed number, HPA, KPA, and KPA with the trainer's plans."""

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from typing_extensions import override

from autoscaler_bench.events import Clock
from autoscaler_bench.plans import RUN, Planner
from autoscaler_bench.pool import Pool
from etude.common.api.pool.autoscaling import ScaleToZero, ScalingMode, ZeroMode
from etude.operator.pools.autoscaling import config
from etude.operator.pools.autoscaling.decide import decide_pool
from etude.operator.pools.autoscaling.limits import victims
from etude.operator.pools.autoscaling.provisioning import PRIOR, ProvisionTime, estimate_provision
from etude.operator.pools.autoscaling.reactive import PanicState, reactive_size
from etude.operator.pools.autoscaling.values import PoolMetrics, PoolState, initial_state
from etude.operator.pools.autoscaling.windows import Sample, Samples, add_peak, add_sample

KNATIVE = config.ScalingParameters(
    mode=ScalingMode.REACTIVE,
    target_utilization_percent=70,
    max_scale_up_rate=1000,
    scale_down_delay_s=0,
    scale_to_zero=ScaleToZero(mode=ZeroMode.WHEN_IDLE),
)
"""The defaults of Knative's configuration."""


SYNC_S, STABILISATION_S, TOLERANCE = 15.0, 300.0, 0.1
"""The defaults of Kubernetes' HorizontalPodAutoscaler."""


class Order(NamedTuple):
    """What to do to a pool, as fast as its cluster bears whoever scales it."""

    creates: int
    victims: tuple[str, ...]
    withdrawn: int = 0
    """Replicas that are not ready, and that are to go."""


class Scaler(Protocol):
    """Decides how many replicas there are."""

    def decide(self) -> Order:
        """Called every tick."""


def order(pool: Pool, desired: int) -> Order:
    """What brings a pool to a number; leased replicas always stay."""
    present = pool.ready + pool.creating
    excess = present - max(desired, pool.holding)
    return Order(max(0, desired - present), victims(pool.idle(), excess) if excess > 0 else ())


@dataclass(slots=True)
class Fixed(Scaler):
    """As many replicas as the most that the trace ever needs, all the time."""

    pool: Pool
    replicas: int

    @override
    def decide(self) -> Order:
        return order(self.pool, self.replicas)


@dataclass(slots=True)
class Hpa(Scaler):
    """Kubernetes' HorizontalPodAutoscaler on demand per replica, with its defaults."""

    clock: Clock
    pool: Pool
    target: float = 0.8
    """Of a replica's slots."""
    _said: Samples = ()
    _synced_s: float = -math.inf

    @override
    def decide(self) -> Order:
        if self.clock.now_s - self._synced_s >= SYNC_S:
            self._synced_s = self.clock.now_s
            self._sync()
        return order(self.pool, min(self.pool.trace.max_replicas, int(self._said[0].value)))

    def _sync(self) -> None:
        pool, present = self.pool, max(1, self.pool.ready + self.pool.creating)
        share = pool.demand / (present * pool.trace.slots)
        wanted = present
        if abs(share / self.target - 1) > TOLERANCE:
            wanted = max(1, math.ceil(present * share / self.target))
        self._said = add_peak(self._said, Sample(self.clock.now_s, wanted), keep_s=STABILISATION_S)


@dataclass(slots=True)
class Kpa(Scaler):
    """Knative's pod autoscaler, with its defaults."""

    clock: Clock
    pool: Pool
    settings: config.ScalingParameters = KNATIVE
    _peaks: Samples = ()
    _samples: Samples = ()
    _panic: PanicState | None = None
    _busy_s: float = 0.0

    @override
    def decide(self) -> Order:
        now_s, pool = self.clock.now_s, self.pool
        sample = Sample(now_s, pool.demand)
        self._samples = add_sample(self._samples, sample, keep_s=self.settings.stable_window_s)
        found = reactive_size(
            self._samples,
            self._panic,
            self.settings,
            ready=pool.ready,
            slots=pool.trace.slots,
            now_s=now_s,
        )
        if found is None:  # never: there is a sample of now
            return Order(0, ())
        self._panic = found.panic
        if pool.demand:
            self._busy_s = now_s
        delay_s = self.settings.scale_down_delay_s
        wanted = Sample(now_s, found.replicas)
        self._peaks = add_peak(self._peaks, wanted, keep_s=delay_s)
        grace_s = self.settings.stable_window_s + self.settings.scale_to_zero.grace_seconds
        least = int(now_s - self._busy_s <= grace_s)
        return order(pool, min(pool.trace.max_replicas, max(least, int(self._peaks[0].value))))


@dataclass(slots=True)
class Planned(Scaler):
    """Ours: demand that was seen, and the trainer's plans."""

    clock: Clock
    pool: Pool
    planner: Planner
    config: config.PoolScalingConfig
    decide_s: float = 0.0
    """CPU seconds of all decisions."""
    decisions: int = 0
    capped: int = 0
    """Decisions that found more replicas than the hard cap."""
    _state: PoolState = field(default_factory=lambda: initial_state(0, now_s=0.0))
    _provision: ProvisionTime = PRIOR
    _provisions: int = 0
    """How many it is made of."""

    @override
    def decide(self) -> Order:
        metrics, plans = self._metrics(), self.planner.plans()
        began_s = time.process_time()
        decided = decide_pool(self._state, metrics, plans, self.config, self.clock.now_s)
        self.decide_s += time.process_time() - began_s
        self.decisions += 1
        self.capped += decided.is_hard_capped
        self._state = decided.state
        return Order(decided.creates, decided.victims, decided.withdrawn)

    def _metrics(self) -> PoolMetrics:
        pool, now_s = self.pool, self.clock.now_s
        if len(pool.took_s) > self._provisions:
            self._provisions, self._provision = len(pool.took_s), estimate_provision(pool.took_s)
        return PoolMetrics(
            seen_s=now_s,
            wall_s=now_s,
            ready=pool.ready,
            creating=pool.creating,
            terminating=pool.terminating,
            holding=pool.holding,
            leased=pool.leased,
            queued=len(pool.queue),
            holders=frozenset({RUN} if pool.holding else ()),
            idle=pool.idle(),
            held=pool.held(),
            provision=self._provision,
        )
