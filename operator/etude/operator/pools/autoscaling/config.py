"""Autoscaler configuration: `spec.autoscaling` with its defaults filled in."""

from dataclasses import dataclass, field
from enum import StrEnum

TICK_S = 2.0
"""Time between two decisions."""
LEAST_PANIC_S = 1.0
"""Least length of the panic window."""


class Mode(StrEnum):
    """Owner of the number of replicas."""

    MANUAL = "Manual"
    REACTIVE = "Reactive"
    PREDICTIVE = "Predictive"
    EXTERNAL = "External"


class ZeroMode(StrEnum):
    """Condition under which a pool may have no replica."""

    NEVER = "Never"
    WHEN_IDLE = "WhenIdle"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleToZero:
    """Scale-to-zero of an idle pool."""

    mode: ZeroMode = ZeroMode.NEVER
    grace_s: float = 30.0
    """Time after a whole stable window without demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """Minimum of slots from the moments of a cron expression until the next entry's moment."""

    cron: str
    """Five fields."""
    min_idle: int
    """Slots in all, leased ones included."""
    time_zone: str = "UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCosts:
    """Cost of waiting GPUs and of idle sandboxes, in one currency."""

    gpu_second: float
    sandbox_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictiveParameters:
    """Parameters by which plans are acted on."""

    service_level_percent: float = 95.0
    """Share of cases in which the ready replicas must suffice."""
    costs: ScalingCosts | None = None
    """With costs, and GPUs known from a plan, the service level follows from them."""
    max_horizon_s: float = 1800.0
    plan_stale_s: float = 120.0
    """Time since the last report of its controller after which a plan is stale."""

    def __post_init__(self) -> None:
        if not 50 <= self.service_level_percent < 100:
            raise ValueError(
                "serviceLevelPercent must be from 50 to below 100,"
                f" got {self.service_level_percent}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refill:
    """Rate limit of creating replicas."""

    max_per_second: float = 50.0
    max_in_flight: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingParameters:
    """Parameters by which the number of replicas follows demand."""

    mode: Mode = Mode.PREDICTIVE
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
    predictive: PredictiveParameters = field(default_factory=PredictiveParameters)
    refill: Refill = field(default_factory=Refill)

    def __post_init__(self) -> None:
        if self.panic_window_s < LEAST_PANIC_S:
            raise ValueError(
                "panicWindowPercent of stableWindowSeconds must be at least 1 s,"
                f" got {self.panic_window_s:.2f} s: raise one of them"
            )
        if not 0 < self.target_utilization_percent <= 100:
            raise ValueError(
                "targetUtilizationPercent must be above 0 and at most 100,"
                f" got {self.target_utilization_percent}"
            )
        if self.max_scale_up_rate <= 1 or self.max_scale_down_rate <= 1:
            raise ValueError(
                "maxScaleUpRate and maxScaleDownRate must be above 1,"
                f" got {self.max_scale_up_rate} and {self.max_scale_down_rate}"
            )

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

    def __post_init__(self) -> None:
        if self.overcommit_factor < 1:
            raise ValueError(f"overcommitFactor must be at least 1, got {self.overcommit_factor}")
        if self.min_idle > self.max_replicas * self.slots_per_replica:
            raise ValueError(
                f"minIdle of {self.min_idle} slots is more than maxReplicas have:"
                f" {self.max_replicas} x {self.slots_per_replica}"
            )
        if self.min_idle and self.autoscaling.scale_to_zero.mode is ZeroMode.WHEN_IDLE:
            raise ValueError("scaleToZero WhenIdle needs minIdle 0")
