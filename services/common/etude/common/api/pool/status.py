"""Observed state of a pool."""

from typing import Annotated, Literal

from pydantic import Field

from etude.common.api.status_types import Conditions, Count, Figure, Resolved, StatusModel, Time


class Slots(StatusModel):
    """Environments of a pool by state."""

    idle: Count = 0
    """Free."""
    leased: Count = 0
    """Held, those that are preempted included."""
    preempted: Count = 0
    """Held by leases whose environments are paused, so that other classes have their floors."""
    reserved: Count = 0
    """Kept free for classes below their floors, by their demand of the last five minutes."""
    opening: Count = 0
    """Granted, and not ready yet."""
    queued: Count = 0
    """Asked for and waiting."""


class LeaseStatus(StatusModel):
    """Counts and latencies of leases."""

    granted_total: Count = 0
    """Leases ever granted."""
    expired_total: Count = 0
    """Leases that ended because they were not renewed."""
    acquire_p50_ms: Count = 0
    """Median time from request to lease."""
    acquire_p99_ms: Count = 0
    """99th percentile of it."""
    warm_hit_percent: Count = 0
    """Share of the newest starts that found something ready."""


class AutoscalerStatus(StatusModel):
    """Latest decision on the number of hosts."""

    mode: Annotated[str, Field(max_length=16)] = ""
    """What asked for the most: Stable, Panic, Planned or Scheduled; Manual and External while
    the operator does not decide; Unknown while brokers are silent."""
    stable_value: Figure | None = None
    """Mean demand in slots over the stable window."""
    panic_value: Figure | None = None
    """The same over the panic window."""
    plan_peak: Count = 0
    """Slots that plans ask for now."""
    plan_version: Count = 0
    """Of the newest plan that is acted on; 0 for none."""
    excess_burst_capacity: int = 0
    """Slots that would be left after a burst of burstCapacity."""
    hard_cap: Count = 0
    """Hosts that demand of late explains at most."""
    last_scale_time: Time | None = None
    """When desired changed last."""
    last_reason: Annotated[str, Field(max_length=256)] = ""
    """What changed it."""


class ProvisionStatus(StatusModel):
    """Time of hosts from their creation until they are ready."""

    p50_seconds: Figure
    """Half of them are ready by then."""
    p95_seconds: Figure
    """Nineteen of twenty."""
    samples: Count = 0
    """Hosts that this was learnt from; the fewer, the more of it is assumed."""


class EnvPoolStatus(StatusModel):
    """Observed state of a pool."""

    observed_generation: Count = 0
    """Generation of the spec that this status is about."""
    phase: Annotated[str, Field(max_length=32)] = ""
    """One word, derived from the conditions; nothing is decided by it."""
    conditions: Conditions = ()
    """Facts, each with a reason."""
    replicas: Count = 0
    """Hosts that exist."""
    ready_replicas: Count = 0
    """Hosts that answer their readiness probe."""
    desired: Count = 0
    """Hosts that there should be."""
    creating: Count = 0
    """Hosts that are not ready yet."""
    terminating: Count = 0
    """Hosts that are being deleted."""
    unschedulable: Count = 0
    """Hosts that wait for a node."""
    quarantined: Count = 0
    """Unhealthy hosts that are kept for inspection, with others in their place."""
    draining: Count = 0
    """Hosts that get no more environments, and go once they hold none."""
    autoscaler: AutoscalerStatus = Field(default_factory=AutoscalerStatus)
    """What decided on desired."""
    provision: ProvisionStatus | None = None
    """How long hosts take to be ready."""
    selector: Annotated[str, Field(max_length=253)] = ""
    """Label selector of the hosts, for the scale subresource."""
    slots: Slots | None = None
    """Environments by state."""
    leases: LeaseStatus | None = None
    """Counts and latencies of leases."""
    driver: Annotated[str, Field(max_length=63)] = ""
    """Driver that the hosts run."""
    isolation: Literal["Weak", "Moderate", "Strong", ""] = ""
    """Strength of the isolation of each environment."""
    resolved: Resolved | None = None
    """Defaults pinned at acceptance."""
