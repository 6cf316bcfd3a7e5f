"""One trace under one mode, and what came of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from autoscaler_bench.events import Clock
from autoscaler_bench.oracle import Oracle, known, need
from autoscaler_bench.plans import Planner
from autoscaler_bench.pool import Pool
from autoscaler_bench.run import Run
from autoscaler_bench.scalers import Fixed, Hpa, Kpa, Planned, Scaler
from autoscaler_bench.traces import Trace
from etude.common.api.pool.autoscaling import Autoscaling as GivenAutoscaling
from etude.common.api.pool.autoscaling import PredictiveScaling, Refill, ScalingMode
from etude.common.api.pool.spec import EnvPoolSpec, Template
from etude.operator.pools.autoscaling.config import (
    TICK_S,
    PoolScalingConfig,
    ScalingParameters,
    pool_config,
)
from etude.operator.pools.autoscaling.limits import num_creates, refill_tokens
from etude.operator.pools.autoscaling.values import CreationBucket
from etude.trainer.controller.admission.plans import REPEAT_S

REFILL = Refill()
"""How fast the cluster bears replicas to be created, whoever asks."""


DEFAULTS = pool_config(
    EnvPoolSpec(
        templates=(Template(name="any"),),
        max_replicas=1,
        autoscaling=GivenAutoscaling(mode=ScalingMode.PREDICTIVE),
    )
)
"""What a pool has that says nothing but its mode."""
PATIENT = ScalingParameters(predictive=PredictiveScaling(service_level_percent=95))
"""One set of settings with and without a plan, for what nobody knows: longer windows and delays."""


class Mode(StrEnum):
    """What sizes the pool."""

    FIXED = "fixed"
    HPA = "hpa"
    KPA = "kpa"
    PLAN = "kpa_plan"
    ORACLE = "oracle"
    TUNED = "kpa_tuned"
    PATIENT = "kpa_plan_patient"


PLANNED = {Mode.PLAN, Mode.PATIENT}


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
    _bucket: CreationBucket = field(default_factory=lambda: CreationBucket(0.0, 0.0))

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
                settings = DEFAULTS.while_planned or PATIENT
                scaler = Kpa(self.clock, pool, settings)
            case Mode.PLAN:
                scaler = Planned(self.clock, pool, planner, self._config(DEFAULTS))
            case Mode.PATIENT:
                patient = replace(DEFAULTS, autoscaling=PATIENT, while_planned=None)
                scaler = Planned(self.clock, pool, planner, self._config(patient))
            case Mode.ORACLE:
                scaler = Oracle(self.clock, pool, run, need(self.trace))
        return scaler

    def _config(self, config: PoolScalingConfig) -> PoolScalingConfig:
        trace = self.trace
        return replace(config, max_replicas=trace.max_replicas, slots_per_replica=trace.slots)

    def _acting(self, pool: Pool, scaler: Scaler) -> Callable[[], None]:
        """Do what a scaler says, as fast as replicas can be created."""

        def act() -> None:
            ordered = scaler.decide()
            for name in ordered.victims:
                pool.remove(name)
            pool.withdraw(ordered.withdrawn)
            bucket = refill_tokens(self._bucket, REFILL, now_s=self.clock.now_s)
            number = num_creates(ordered.creates, bucket, REFILL, creating=pool.creating)
            self._bucket = bucket._replace(tokens=bucket.tokens - number)
            for _ in range(number):
                pool.create()

        return act
