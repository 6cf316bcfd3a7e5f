"""Values of an autoscaler decision: metrics, plans, state and result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from etude.common.plans.forecast import Quantile, Wave
from etude.operator.pools.autoscaling.config import TICK_S
from etude.operator.pools.autoscaling.provisioning import ProvisionTime
from etude.operator.pools.autoscaling.reactive import PanicState
from etude.operator.pools.autoscaling.windows import Sample, Samples, add_peak


class IdleReplica(NamedTuple):
    """A replica that holds no lease."""

    name: str
    since_s: float
    is_cached: bool = True
    """It has cached the images of its pool's templates."""
    is_draining: bool = False
    """Its node is being drained."""


class HeldLeases(NamedTuple):
    """Leases of one template that began at about one time."""

    template: str
    environments: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMetrics:
    """Metrics of a pool now."""

    seen_s: float
    """Time of the oldest of its brokers' newest reports."""
    wall_s: float
    """Seconds since 1970, for the schedule."""
    ready: int
    creating: int = 0
    unschedulable: int = 0
    """Of the creating replicas, the unschedulable ones."""
    terminating: int = 0
    holding: int = 0
    """Replicas that hold a lease."""
    leased: int = 0
    """Slots."""
    queued: int = 0
    """Environments that wait for a slot."""
    holders: frozenset[str] = frozenset()
    """Runs that hold leases."""
    idle: tuple[IdleReplica, ...] = ()
    held: tuple[HeldLeases, ...] = ()
    """The leased slots by age; leases missing here count as kept for ever."""
    lease: tuple[Quantile, ...] = ()
    """Lease durations of templates without a plan."""
    provision: ProvisionTime
    """Provisioning time of templates that are not in provisions."""
    provisions: Mapping[str, ProvisionTime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandPlan:
    """One run's forecast of the environments that it will ask this pool for."""

    run_id: str
    version: int
    heard_s: float
    """Time at which its controller last sent or confirmed it."""
    until_s: float
    """End of its horizon."""
    waves: tuple[Wave, ...]
    """Future waves, on the clock of the decision."""
    ratio: float = 1.0
    """Ratio of recent observed to forecast environments."""
    gpus: int = 0
    """GPUs that idle while one of its waves waits; 0 is unknown."""


class CreationBucket(NamedTuple):
    """Token bucket of replicas that may be created."""

    tokens: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """State that one decision passes to the next."""

    desired: int
    """Replicas."""
    staffed: int = 0
    """Of these, existing replicas and those created by the decision."""
    samples: Samples = ()
    """Of demand in slots, as long as the stable window."""
    peaks: Samples = ()
    """Highest desired replicas, for as long as the hard cap remembers."""
    lasting: Samples = ()
    """Highest desired replicas without spares, which have no scale-down delay."""
    panic: PanicState | None = None
    busy_s: float
    """Time of the last demand."""
    bucket: CreationBucket


def initial_state(replicas: int, *, now_s: float) -> PoolState:
    """A state without history that cannot scale down before its windows are full.

    Args:
        replicas: that exist or are being created.
        now_s: on the clock of the decisions.
    """
    return PoolState(
        desired=replicas,
        staffed=replicas,
        peaks=(Sample(now_s, replicas),),
        lasting=(Sample(now_s, replicas),),
        panic=PanicState(now_s, replicas) if replicas > 1 else None,
        busy_s=now_s,
        bucket=CreationBucket(0.0, now_s - TICK_S),
    )


def state_after_silence(state: PoolState, replicas: int, *, now_s: float) -> PoolState:
    """The state after silent brokers, with the history of demand dropped.

    Replicas desired before the silence still explain those that terminate.

    Args:
        state: at the end of the silence.
        replicas: that exist or are being created.
        now_s: on the clock of the decisions.
    """
    present = Sample(now_s, replicas)
    return replace(
        initial_state(replicas, now_s=now_s),
        peaks=add_peak(state.peaks, present, keep_s=math.inf),
        lasting=add_peak(state.lasting, present, keep_s=math.inf),
        bucket=state.bucket,
    )


class ScalingCause(StrEnum):
    """The source that asks for the most replicas."""

    STABLE = "Stable"
    """Demand over the stable window."""
    PANIC = "Panic"
    """Demand over the panic window, which outgrew the pool."""
    PLANNED = "Planned"
    """Plans of trainers."""
    SCHEDULED = "Scheduled"
    """The schedule of the spec."""
    UNKNOWN = "Unknown"
    """No decision: brokers are silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDecision:
    """Decision about a pool's size, with its cause."""

    state: PoolState
    desired: int
    """Replicas."""
    creates: int = 0
    """Replicas to create now; the rest of the difference waits."""
    victims: tuple[str, ...] = ()
    """Idle replicas to drain, and to delete once they are empty."""
    withdrawn: int = 0
    """Number of unready replicas to remove."""
    cause: ScalingCause = ScalingCause.STABLE
    """The source that asked for the most."""
    stable: float = 0.0
    """Mean demand of the stable window, in slots."""
    panicked: float = 0.0
    """Mean demand of the panic window, in slots."""
    plan_peak: float = 0.0
    """Slots that plans ask for now."""
    unreliable: tuple[str, ...] = ()
    """Runs whose plans are ignored because they were inaccurate."""
    excess_burst_capacity: int = 0
    hard_cap: int = 0
    is_hard_capped: bool = False
    """There are more replicas than recent demand explains."""
