"""Size of a pool: hosts that should exist now, by the autoscaler or as the spec asks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from etude.common.api.kinds import EnvPool
from etude.common.api.meta import number
from etude.common.api.pool.autoscaling import ScalingMode
from etude.operator.actions import ClockReading
from etude.operator.manifests import Manifest, is_true, uid
from etude.operator.names import ordinal
from etude.operator.pools.autoscaling.config import TICK_S, planning_config, pool_config
from etude.operator.pools.autoscaling.decide import decide_pool, is_silent
from etude.operator.pools.autoscaling.predictive import forecast_demand, usable_plans
from etude.operator.pools.autoscaling.provisioning import PRIOR, ProvisionTime
from etude.operator.pools.autoscaling.values import (
    PoolDecision,
    PoolState,
    ScalingCause,
    initial_state,
    state_after_silence,
)
from etude.operator.pools.health import (
    HealthFindings,
    HealthMonitor,
    ProvisionTracker,
    TerminatingHosts,
    is_unschedulable,
)
from etude.operator.pools.observe import (
    ObservedPool,
    ReportedHost,
    host_name,
    pool_metrics,
    reported_hosts,
    run_plans,
    staying_hosts,
)

STATE_LIFETIME_S = 30.0
"""State older than this is dropped, as after a restart of the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Hosts that a pool should have, and hosts that should go."""

    desired: int
    limit: int
    """Number of hosts up to which some may be created now; the rest waits."""
    retiring: tuple[str, ...] = ()
    """Hosts that get no more environments, and are deleted once they hold none."""
    decision: PoolDecision | None = None
    """The autoscaler's decision, where the operator sizes the pool."""
    plan_peak: int = 0
    """Slots that plans ask for from a pool in mode External, for its external autoscaler."""
    has_silent_brokers: bool = False
    """Its brokers are silent."""
    plan_version: int = 0
    """Version of the newest plan that counted."""
    provision: ProvisionTime = PRIOR
    samples: int = 0
    """Hosts that provision was measured on."""
    findings: HealthFindings = field(default_factory=HealthFindings)
    """Findings about unhealthy hosts."""


class PlannedDemand(NamedTuple):
    """Planned demand of a pool in mode External."""

    plan_peak: int
    has_silent_brokers: bool


@dataclass(slots=True)
class PoolSizer:
    """Sizes one pool, with the state that its next decision needs."""

    provisions: ProvisionTracker
    health: HealthMonitor = field(default_factory=HealthMonitor)
    terminating: TerminatingHosts = field(default_factory=TerminatingHosts)
    _state: PoolState | None = None
    _size: PoolSize | None = None
    _decided_s: float = 0.0

    def decide_size(
        self,
        pool: EnvPool,
        observed: ObservedPool,
        now: ClockReading,
    ) -> PoolSize:
        """The size of a pool now; a decision holds for TICK_S.

        Args:
            pool: with its spec.
            observed: its observed state.
            now: both clocks.
        """
        hosts, now_s = observed.hosts, now.monotonic_s
        self.provisions.observe(hosts, now_s=now_s)
        findings = self.health.observe(hosts, pool.spec.health, now_s=now_s)
        self.terminating.observe(hosts, now_s=now_s)
        stuck = self.terminating.stuck_hosts(hosts, now_s=now_s)
        unhealthy = {*findings.quarantined, *findings.to_delete}
        healthy = [
            host for host in hosts if host_name(host) not in unhealthy and uid(host) not in stuck
        ]
        size = replace(
            self._size_of_healthy(pool, replace(observed, hosts=healthy), now),
            provision=self.provisions.estimate,
            samples=len(self.provisions.samples_s),
        )
        return adjust_for_health(size, findings, pool, present=len(staying_hosts(hosts)))

    def _size_of_healthy(
        self,
        pool: EnvPool,
        observed: ObservedPool,
        now: ClockReading,
    ) -> PoolSize:
        if pool.spec.is_sized_for_demand:
            return self._autoscale(pool, observed, now)
        self._state = self._size = None
        size = requested_size(pool, observed)
        if pool.spec.mode is ScalingMode.EXTERNAL:
            size = replace(size, **self._planned_demand(pool, observed, now)._asdict())
        return size

    def _planned_demand(
        self,
        pool: EnvPool,
        observed: ObservedPool,
        now: ClockReading,
    ) -> PlannedDemand:
        """Planned demand, for the pool's external autoscaler."""
        metrics = pool_metrics(pool, observed, provision=self.provisions.estimate, now=now)
        if is_silent(metrics, now_s=now.monotonic_s):
            return PlannedDemand(0, has_silent_brokers=True)
        config = planning_config(pool.spec)
        usable = usable_plans(run_plans(observed), config.autoscaling, now_s=now.monotonic_s)
        peak = forecast_demand(usable, metrics, config, now_s=now.monotonic_s).peak
        return PlannedDemand(math.ceil(peak), has_silent_brokers=False)

    def _autoscale(
        self,
        pool: EnvPool,
        observed: ObservedPool,
        now: ClockReading,
    ) -> PoolSize:
        now_s = now.monotonic_s
        if self._size is not None and now_s - self._decided_s < TICK_S:
            return self._size
        present = len(staying_hosts(observed.hosts))
        metrics = pool_metrics(pool, observed, provision=self.provisions.estimate, now=now)
        if self._state is None or now_s - self._decided_s > STATE_LIFETIME_S:
            self._state = initial_state(present, now_s=now_s)
        elif self._is_blind and not is_silent(metrics, now_s=now_s):
            self._state = state_after_silence(self._state, present, now_s=now_s)
        plans = run_plans(observed)
        decision = decide_pool(self._state, metrics, plans, pool_config(pool.spec), now_s)
        self._state, self._decided_s = decision.state, now_s
        self._size = PoolSize(
            desired=decision.desired,
            limit=min(decision.desired, present + decision.creates),
            retiring=(*decision.victims, *_unready_to_remove(observed, decision.withdrawn)),
            decision=decision,
            plan_version=max(
                (plan.version for plan in plans if plan.run_id not in decision.unreliable),
                default=0,
            ),
        )
        return self._size

    @property
    def _is_blind(self) -> bool:
        """Brokers were silent at the last decision."""
        last = None if self._size is None else self._size.decision
        return last is not None and last.cause is ScalingCause.UNKNOWN


def adjust_for_health(
    size: PoolSize, findings: HealthFindings, pool: EnvPool, *, present: int
) -> PoolSize:
    """The size of a pool with unhealthy or unschedulable hosts.

    Args:
        size: of the pool without its unhealthy hosts.
        findings: about all hosts.
        pool: the pool.
        present: all hosts that are not terminating.
    """
    num_quarantined, num_deleted = len(findings.quarantined), len(findings.to_delete)
    if not size.desired:
        # No host is wanted, so none is kept for inspection either.
        every = (*findings.to_delete, *findings.quarantined)
        return replace(size, findings=replace(findings, quarantined=(), to_delete=every))
    limit = min(
        size.limit + num_quarantined, pool.spec.max_replicas or size.limit + num_quarantined
    )
    if findings.blocks_creation:
        limit = min(limit, present - num_deleted)
    return replace(size, limit=limit, findings=findings)


def requested_size(pool: EnvPool, observed: ObservedPool) -> PoolSize:
    """The size that users, a HorizontalPodAutoscaler or KEDA have set."""
    desired = pool.spec.asked_replicas
    staying = staying_hosts(observed.hosts)
    reported = reported_hosts(observed.report)
    order = sorted(staying, key=lambda host: _removal_order(host, reported))
    retiring = tuple(host_name(host) for host in order[: max(0, len(staying) - desired)])
    return PoolSize(desired=desired, limit=desired, retiring=retiring)


def _unready_to_remove(observed: ObservedPool, count: int) -> tuple[str, ...]:
    reported = reported_hosts(observed.report)
    order = sorted(
        (
            host
            for host in staying_hosts(observed.hosts)
            if not is_true(host, "Ready") and not _held_environments(host, reported)
        ),
        key=lambda host: _removal_order(host, reported),
    )
    return tuple(host_name(host) for host in order[:count])


def _removal_order(host: Manifest, known: Mapping[str, ReportedHost]) -> tuple[float, ...]:
    """Sort key: unschedulable hosts go first, then unready ones, then those that hold least.

    Of equal ones the newest goes.
    """
    is_ready, ordinal_of = is_true(host, "Ready"), ordinal(host_name(host))
    return (is_ready, not is_unschedulable(host), _held_environments(host, known), -ordinal_of)


def _held_environments(host: Manifest, known: Mapping[str, ReportedHost]) -> int:
    member = known.get(host_name(host))
    return 0 if member is None else member.held


@dataclass(slots=True)
class PoolSizers:
    """Sizers by pool."""

    _of: dict[str, PoolSizer] = field(default_factory=dict)

    def get(self, pool: EnvPool) -> PoolSizer:
        """The sizer of a pool, created at first use."""
        known = self._of.get(pool.metadata.uid)
        if known is None:
            known = self._of[pool.metadata.uid] = PoolSizer(ProvisionTracker(_prior(pool)))
        return known

    def forget(self, uid: str) -> None:
        """Drop the sizer of a deleted pool."""
        self._of.pop(uid, None)


def _prior(pool: EnvPool) -> ProvisionTime:
    """The provisioning times that an earlier operator recorded in the status."""
    told = pool.status.provision
    if told is None or not told.samples:
        return PRIOR
    return ProvisionTime(number(told.p50_seconds), number(told.p95_seconds))
