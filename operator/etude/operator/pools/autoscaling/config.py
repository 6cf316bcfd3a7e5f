"""Autoscaler configuration: `spec.autoscaling` with its defaults filled in."""

from dataclasses import dataclass, field

from etude.common.api.meta import number
from etude.common.api.pool.autoscaling import (
    Autoscaling,
    PredictiveScaling,
    Refill,
    ScaleToZero,
    ScalingMode,
    ScheduleEntry,
)
from etude.common.api.pool.spec import EnvPoolSpec

TICK_S = 2.0
"""Time between two decisions."""
LEAST_PANIC_S = 1.0
"""Least length of the panic window."""
MOST_REPLICAS = 10_000
"""Limit of a pool without maxReplicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingParameters:
    """Parameters by which the number of replicas follows demand."""

    mode: ScalingMode = ScalingMode.PREDICTIVE
    target_utilization_percent: float = 80.0
    stable_window_s: float = 60.0
    panic_window_percent: float = 10.0
    panic_threshold_percent: float = 200.0
    max_scale_up_rate: float = 10.0
    max_scale_down_rate: float = 2.0
    scale_down_delay_s: float = 120.0
    burst_capacity: int = 0
    scale_to_zero: ScaleToZero = field(default_factory=ScaleToZero)
    schedule: tuple[ScheduleEntry, ...] = ()
    predictive: PredictiveScaling = field(default_factory=PredictiveScaling)
    refill: Refill = field(default_factory=Refill)

    @property
    def panic_window_s(self) -> float:
        """Length of the short window."""
        return self.stable_window_s * self.panic_window_percent / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolScalingConfig:
    """Size limits and autoscaling parameters of one pool."""

    max_replicas: int
    slots_per_replica: int = 1
    min_idle: int = 0
    """Slots."""
    overcommit_factor: float = 1.5
    """Limit of replicas as a multiple of demand."""
    autoscaling: ScalingParameters = field(default_factory=ScalingParameters)
    while_planned: ScalingParameters | None = None
    """Parameters while all demand is planned; `autoscaling` unless set. Delays that allow for
    unknown demand may be short only where the next wave is known."""


REACTIVE = ScalingParameters(mode=ScalingMode.REACTIVE)
UNPLANNED = ScalingParameters(max_scale_up_rate=1_000.0, scale_down_delay_s=30.0)
"""Defaults of mode Predictive without a usable plan: a run's first waves come without one."""
PLANNED = ScalingParameters(
    target_utilization_percent=100.0,
    stable_window_s=30.0,
    max_scale_up_rate=1_000.0,
    scale_down_delay_s=15.0,
)
"""Defaults of mode Predictive while all demand is planned: delays may be short."""


def pool_config(spec: EnvPoolSpec) -> PoolScalingConfig:
    """The autoscaler settings of a pool that sizes itself.

    Raises:
        ValueError: the pool does not size itself.
    """
    scaling = spec.autoscaling
    if scaling is None or spec.max_replicas is None or not spec.is_sized_for_demand:
        raise ValueError(f"a pool in mode {spec.mode} does not size itself")
    is_planning = scaling.mode is ScalingMode.PREDICTIVE
    return PoolScalingConfig(
        max_replicas=spec.max_replicas,
        slots_per_replica=spec.slots_per_replica,
        min_idle=spec.min_idle or 0,
        overcommit_factor=1.5 if spec.overcommit_factor is None else number(spec.overcommit_factor),
        autoscaling=_parameters(scaling, UNPLANNED if is_planning else REACTIVE),
        while_planned=_parameters(scaling, PLANNED) if is_planning else None,
    )


def planning_config(spec: EnvPoolSpec) -> PoolScalingConfig:
    """The settings by which plans are read for a pool that an external autoscaler sizes."""
    return PoolScalingConfig(
        max_replicas=spec.max_replicas or MOST_REPLICAS,
        slots_per_replica=spec.slots_per_replica,
        autoscaling=PLANNED,
    )


def _parameters(scaling: Autoscaling, defaults: ScalingParameters) -> ScalingParameters:
    numbers = {
        name: getattr(defaults, name) if value is None else float(value)
        for name, value in (
            ("target_utilization_percent", scaling.target_utilization_percent),
            ("stable_window_s", scaling.stable_window_seconds),
            ("panic_window_percent", scaling.panic_window_percent),
            ("panic_threshold_percent", scaling.panic_threshold_percent),
            ("max_scale_up_rate", scaling.max_scale_up_rate),
            ("max_scale_down_rate", scaling.max_scale_down_rate),
            ("scale_down_delay_s", scaling.scale_down_delay_seconds),
        )
    }
    # A share of 60 s was admitted: of the 30 s of a pool with a plan it may be too short.
    least_percent = 100 * LEAST_PANIC_S / numbers["stable_window_s"]
    numbers["panic_window_percent"] = max(numbers["panic_window_percent"], least_percent)
    return ScalingParameters(
        **numbers,
        mode=scaling.mode,
        burst_capacity=scaling.burst_capacity or 0,
        scale_to_zero=scaling.scale_to_zero or ScaleToZero(),
        schedule=scaling.schedule,
        predictive=scaling.predictive or PredictiveScaling(),
        refill=scaling.refill or Refill(),
    )
