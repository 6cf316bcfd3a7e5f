"""What a decision about a pool's size is made of, and what it says."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from etude.common.plans.forecast import Quantile, Wave
from etude.operator.scaling.config import TICK_S
from etude.operator.scaling.provision import Provision
from etude.operator.scaling.reactive import Panic
from etude.operator.scaling.windows import Sample, Samples, raised


class IdleReplica(NamedTuple):
    """A replica that holds no lease."""

    name: str
    since_s: float
    is_cached: bool = True
    """Whether it has the images at hand that its pool's templates need."""
    is_draining: bool = False
    """Whether its machine is to be vacated."""


class Held(NamedTuple):
    """Leases of one template that began at about one time."""

    template: str
    environments: int
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMetrics:
    """What a pool looks like now."""

    seen_s: float
    """When its brokers last said how many leases there are."""
    wall_s: float
    """Seconds since 1970, for the schedule."""
    ready: int
    creating: int = 0
    unplaced: int = 0
    """Of those that are being created, those that no machine takes."""
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
    held: tuple[Held, ...] = ()
    """The leased slots by age; those that are missing here count as kept for ever."""
    lease: tuple[Quantile, ...] = ()
    """How long leases of templates last of which no plan says it."""
    provision: Provision
    """Of templates that are not in provisions."""
    provisions: Mapping[str, Provision] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run's forecast of the environments that it will ask this pool for."""

    run_id: str
    version: int
    heard_s: float
    """When its controller last told or confirmed it."""
    until_s: float
    """After this it says nothing."""
    waves: tuple[Wave, ...]
    """Those that have not come, on the clock of the decision."""
    ratio: float = 1.0
    """Observed over forecast environments of late."""
    gpus: int = 0
    """GPUs that stand still while a wave of it waits; 0 is unknown."""


class Bucket(NamedTuple):
    """Replicas that may be created at once."""

    tokens: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """What one decision leaves to the next."""

    desired: int
    """Replicas."""
    staffed: int = 0
    """Of these, those that there were, or that were to be created at once."""
    samples: Samples = ()
    """Of demand in slots, as long as the stable window."""
    peaks: Samples = ()
    """The highest of what was wanted, in replicas, as long as the cap remembers."""
    lasting: Samples = ()
    """The same without spares, which are not kept for the delay once enough are ready."""
    panic: Panic | None = None
    busy_s: float
    """When there was demand last."""
    bucket: Bucket


def restarted(replicas: int, *, now_s: float) -> PoolState:
    """A state without memory that cannot scale down before its windows are full.

    Args:
        replicas: that exist or are being created.
        now_s: on the clock of the decisions.
    """
    return PoolState(
        desired=replicas,
        staffed=replicas,
        peaks=(Sample(now_s, replicas),),
        lasting=(Sample(now_s, replicas),),
        panic=Panic(now_s, replicas) if replicas > 1 else None,
        busy_s=now_s,
        bucket=Bucket(0.0, now_s - TICK_S),
    )


def resumed(state: PoolState, replicas: int, *, now_s: float) -> PoolState:
    """A state after a silence, with as little known of demand as after a restart.

    What was wanted before it still explains replicas that are on their way out.

    Args:
        state: as the silence left it.
        replicas: that exist or are being created.
        now_s: on the clock of the decisions.
    """
    here = Sample(now_s, replicas)
    return replace(
        restarted(replicas, now_s=now_s),
        peaks=raised(state.peaks, here, keep_s=math.inf),
        lasting=raised(state.lasting, here, keep_s=math.inf),
        bucket=state.bucket,
    )


class Cause(StrEnum):
    """What asked for the most replicas."""

    STABLE = "Stable"
    """Demand over the stable window."""
    PANIC = "Panic"
    """Demand of the last seconds, which outgrew the pool."""
    PLANNED = "Planned"
    """Plans of trainers."""
    SCHEDULED = "Scheduled"
    """The schedule of the spec."""
    UNKNOWN = "Unknown"
    """Nothing is decided: brokers are silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDecision:
    """What to do about a pool's size, and why."""

    state: PoolState
    desired: int
    """Replicas."""
    creates: int = 0
    """Replicas to create now; the rest of the difference waits for its turn."""
    victims: tuple[str, ...] = ()
    """Idle replicas to drain, and to delete once they answer that they are empty."""
    withdrawn: int = 0
    """Replicas that are not ready, and that nothing wants any more; they go likewise."""
    cause: Cause = Cause.STABLE
    """What asked for the most."""
    stable: float = 0.0
    """Mean demand of the stable window, in slots."""
    panicked: float = 0.0
    """Mean demand of the panic window, in slots."""
    plan_peak: float = 0.0
    """Slots that plans ask for now."""
    unreliable: tuple[str, ...] = ()
    """Runs whose plans are not acted on since what came was far from them."""
    excess_burst_capacity: int = 0
    hard_cap: int = 0
    is_hard_capped: bool = False
    """Whether there are more replicas than any demand of late explains."""
