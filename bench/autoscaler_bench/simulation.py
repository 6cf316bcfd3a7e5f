"""One trace under one mode, and what came of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from autoscaler_bench.events import Clock
from autoscaler_bench.oracle import Oracle, known, need
from autoscaler_bench.plans import Planner
from autoscaler_bench.pool import Pool
from autoscaler_bench.run import Run
from autoscaler_bench.scalers import Fixed, Hpa, Kpa, Planned, Scaler
from autoscaler_bench.traces import Trace
from etude.operator.scaling.config import TICK_S, Autoscaling, PoolConfig, Predictive, Refill
from etude.operator.scaling.limits import creates, refilled
from etude.operator.scaling.values import Bucket
from etude.trainer.controller.planning import REPEAT_S

REFILL = Refill()
"""How fast the cluster bears replicas to be created, whoever asks."""


SETTINGS = Autoscaling(
    target_utilization_percent=100,
    stable_window_s=30,
    max_scale_up_rate=1000,
    scale_down_delay_s=15,
    predictive=Predictive(service_level_percent=80),
)
"""Of a pool all of whose runs plan: what waits for the unknown by default may be short then."""


class Mode(StrEnum):
    """What sizes the pool."""

    FIXED = "fixed"
    HPA = "hpa"
    KPA = "kpa"
    PLAN = "kpa_plan"
    ORACLE = "oracle"
    TUNED = "kpa_tuned"
    DEFAULTS = "kpa_plan_defaults"


PLANNED = {Mode.PLAN, Mode.DEFAULTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trace cost under a mode."""

    idle_s: float
    """GPU-seconds that waited for environments."""
    sandbox_s: float
    """Replica-seconds, from creation until gone."""
    over_created: int
    """Replicas that never held a lease."""
    waits_s: list[float]
    """Of each environment."""
    lasted_s: float
    decisions: int = 0
    decide_s: float = 0.0
    """CPU seconds of all decisions."""
    capped: int = 0
    cpu_s: float = 0.0


@dataclass(slots=True)
class Simulation:
    """A pool, a run, and what sizes the one for the other."""

    trace: Trace
    mode: Mode
    clock: Clock = field(default_factory=Clock)
    _bucket: Bucket = field(default_factory=lambda: Bucket(0.0, 0.0))

    def outcome(self) -> Outcome:
        """Run the trace to its end."""
        began_s = time.process_time()
        pool = Pool(self.clock, known(self.trace) if self.mode is Mode.ORACLE else self.trace)
        planner = Planner(self.clock, self.trace)
        run = Run(self.clock, pool, self.trace, planner if self.mode in PLANNED else None)
        scaler = self._scaler(pool, run, planner)
        run.start()
        if self.mode in PLANNED:
            self.clock.every(REPEAT_S, planner.repeat)
        self.clock.every(TICK_S, self._acting(pool, scaler))
        self.clock.run(lambda: run.is_over)
        pool.close()
        planned = scaler if isinstance(scaler, Planned) else None
        return Outcome(
            idle_s=run.idle_s,
            sandbox_s=pool.sandbox_s,
            over_created=pool.over_created,
            waits_s=pool.waits_s,
            lasted_s=self.clock.now_s,
            decisions=planned.decisions if planned else 0,
            decide_s=planned.decide_s if planned else 0.0,
            capped=planned.capped if planned else 0,
            cpu_s=time.process_time() - began_s,
        )

    def _scaler(self, pool: Pool, run: Run, planner: Planner) -> Scaler:
        scaler: Scaler
        match self.mode:
            case Mode.FIXED:
                scaler = Fixed(pool, -(-need(self.trace).most // self.trace.slots))
            case Mode.HPA:
                scaler = Hpa(self.clock, pool)
            case Mode.KPA:
                scaler = Kpa(self.clock, pool)
            case Mode.TUNED:
                scaler = Kpa(self.clock, pool, SETTINGS)
            case Mode.PLAN:
                scaler = Planned(self.clock, pool, planner, self._config(SETTINGS))
            case Mode.DEFAULTS:
                scaler = Planned(self.clock, pool, planner, self._config(Autoscaling()))
            case Mode.ORACLE:
                scaler = Oracle(self.clock, pool, run, need(self.trace))
        return scaler

    def _config(self, autoscaling: Autoscaling) -> PoolConfig:
        return PoolConfig(
            max_replicas=self.trace.max_replicas,
            slots_per_replica=self.trace.slots,
            autoscaling=autoscaling,
        )

    def _acting(self, pool: Pool, scaler: Scaler) -> Callable[[], None]:
        """Do what a scaler says, as fast as replicas can be created."""

        def act() -> None:
            ordered = scaler.decide()
            for name in ordered.victims:
                pool.remove(name)
            bucket = refilled(self._bucket, REFILL, now_s=self.clock.now_s)
            number = creates(ordered.creates, bucket, REFILL, creating=pool.creating)
            self._bucket = bucket._replace(tokens=bucket.tokens - number)
            for _ in range(number):
                pool.create()

        return act
