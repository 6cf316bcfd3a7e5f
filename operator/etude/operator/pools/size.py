"""Size of a pool: hosts that should exist now, by the autoscaler or as the spec asks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from etude.common.api.kinds import EnvPool
from etude.common.api.meta import number
from etude.common.api.pool.autoscaling import ScalingMode
from etude.operator.actions import Moment
from etude.operator.manifests import Manifest, is_true, uid
from etude.operator.names import ordinal
from etude.operator.pools.autoscaling.config import TICK_S
from etude.operator.pools.autoscaling.decide import decide_pool, is_silent
from etude.operator.pools.autoscaling.predictive import outlook, usable
from etude.operator.pools.autoscaling.provisioning import PRIOR, Provision
from etude.operator.pools.autoscaling.values import (
    Cause,
    PoolDecision,
    PoolState,
    restarted,
    resumed,
)
from etude.operator.pools.health import Findings, Going, Provisions, Ward, is_unplaced
from etude.operator.pools.observed import Member, members, metrics, name_of, plans, staying
from etude.operator.pools.settings import planning_config, pool_config
from etude.operator.remotes.report_store import PoolReport

FORGOTTEN_S = 30.0
"""State older than this is dropped, as after a restart of the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
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
    is_blind: bool = False
    """Its brokers are silent."""
    plan_version: int = 0
    """Version of the newest plan that counted."""
    provision: Provision = PRIOR
    samples: int = 0
    """Hosts that provision was measured on."""
    findings: Findings = field(default_factory=Findings)
    """Findings about unhealthy hosts."""


class Told(NamedTuple):
    """Planned demand of a pool in mode External."""

    plan_peak: int
    is_blind: bool


@dataclass(slots=True)
class Sizer:
    """Sizes one pool, with the state that its next decision needs."""

    provisions: Provisions
    ward: Ward = field(default_factory=Ward)
    going: Going = field(default_factory=Going)
    _state: PoolState | None = None
    _size: Size | None = None
    _decided_s: float = 0.0

    def size(
        self,
        pool: EnvPool,
        nodes: Sequence[Manifest],
        report: PoolReport,
        asking: Mapping[str, int | None],
        now: Moment,
    ) -> Size:
        """The size of a pool now; a decision holds for TICK_S.

        Args:
            pool: as it is wanted.
            nodes: its pods.
            report: what its brokers said.
            asking: GPUs of each run, by uid; None for one that is suspended or over.
            now: this moment.
        """
        self.provisions.see(nodes, now_s=now.monotonic_s)
        findings = self.ward.see(nodes, pool.spec.health, now_s=now.monotonic_s)
        self.going.see(nodes, now_s=now.monotonic_s)
        stuck = self.going.stuck(nodes, now_s=now.monotonic_s)
        ill = {*findings.quarantined, *findings.given_up}
        well = [node for node in nodes if name_of(node) not in ill and uid(node) not in stuck]
        made = self._of_the_well(pool, well, report, asking, now)
        took = self.provisions
        made = replace(made, provision=took.found, samples=len(took.took_s))
        return tended(made, findings, pool, present=len(staying(nodes)))

    def _of_the_well(
        self,
        pool: EnvPool,
        nodes: Sequence[Manifest],
        report: PoolReport,
        asking: Mapping[str, int | None],
        now: Moment,
    ) -> Size:
        if not pool.spec.is_sized_for_demand:
            self._state = self._size = None
            made = asked_for(pool, nodes, report)
            if pool.spec.mode is ScalingMode.EXTERNAL:
                made = replace(made, **self._told(pool, nodes, report, asking, now)._asdict())
        else:
            made = self._decided(pool, nodes, report, asking, now)
        return made

    def _told(
        self,
        pool: EnvPool,
        nodes: Sequence[Manifest],
        report: PoolReport,
        asking: Mapping[str, int | None],
        now: Moment,
    ) -> Told:
        """Planned demand, for the pool's external autoscaler."""
        seen = metrics(
            nodes, report, brokers=pool.spec.brokers, provision=self.provisions.found, now=now
        )
        if is_silent(seen, now_s=now.monotonic_s):
            return Told(0, is_blind=True)
        config = planning_config(pool.spec)
        believed = usable(plans(report, asking), config.autoscaling, now_s=now.monotonic_s)
        peak = outlook(believed, seen, config, now_s=now.monotonic_s).peak
        return Told(math.ceil(peak), is_blind=False)

    def _decided(
        self,
        pool: EnvPool,
        nodes: Sequence[Manifest],
        report: PoolReport,
        asking: Mapping[str, int | None],
        now: Moment,
    ) -> Size:
        now_s = now.monotonic_s
        if self._size is not None and now_s - self._decided_s < TICK_S:
            return self._size
        present = len(staying(nodes))
        seen = metrics(
            nodes, report, brokers=pool.spec.brokers, provision=self.provisions.found, now=now
        )
        if self._state is None or now_s - self._decided_s > FORGOTTEN_S:
            self._state = restarted(present, now_s=now_s)
        elif self._is_blind and not is_silent(seen, now_s=now_s):
            self._state = resumed(self._state, present, now_s=now_s)
        told = plans(report, asking)
        decision = decide_pool(self._state, seen, told, pool_config(pool.spec), now_s)
        self._state, self._decided_s = decision.state, now_s
        self._size = Size(
            desired=decision.desired,
            limit=min(decision.desired, present + decision.creates),
            retiring=(*decision.victims, *_withdrawn(nodes, report, decision.withdrawn)),
            decision=decision,
            plan_version=max(
                (plan.version for plan in told if plan.run_id not in decision.unreliable), default=0
            ),
        )
        return self._size

    @property
    def _is_blind(self) -> bool:
        """Brokers were silent at the last decision."""
        last = None if self._size is None else self._size.decision
        return last is not None and last.cause is Cause.UNKNOWN


def tended(size: Size, findings: Findings, pool: EnvPool, *, present: int) -> Size:
    """The size of a pool with unhealthy or unschedulable hosts.

    Args:
        size: of the pool without its unhealthy hosts.
        findings: about all hosts.
        pool: the pool.
        present: all hosts that are not terminating.
    """
    kept, gone = len(findings.quarantined), len(findings.given_up)
    if not size.desired:
        # No host is wanted, so none is kept for inspection either.
        every = (*findings.given_up, *findings.quarantined)
        return replace(size, findings=replace(findings, quarantined=(), given_up=every))
    limit = min(size.limit + kept, pool.spec.max_replicas or size.limit + kept)
    if findings.is_full:
        limit = min(limit, present - gone)
    return replace(size, limit=limit, findings=findings)


def asked_for(pool: EnvPool, nodes: Sequence[Manifest], report: PoolReport) -> Size:
    """The size that users, a HorizontalPodAutoscaler or KEDA have set."""
    desired = pool.spec.asked_replicas
    there = staying(nodes)
    known = members(report)
    order = sorted(there, key=lambda node: _missed_least(node, known))
    retiring = tuple(name_of(node) for node in order[: max(0, len(there) - desired)])
    return Size(desired=desired, limit=desired, retiring=retiring)


def _withdrawn(nodes: Sequence[Manifest], report: PoolReport, count: int) -> tuple[str, ...]:
    """Names of at most `count` hosts that are not ready and hold nothing."""
    known = members(report)
    order = sorted(
        (node for node in staying(nodes) if not is_true(node, "Ready") and not _held(node, known)),
        key=lambda node: _missed_least(node, known),
    )
    return tuple(name_of(node) for node in order[:count])


def _missed_least(node: Manifest, known: Mapping[str, Member]) -> tuple[float, ...]:
    """Sort key: unschedulable hosts go first, then unready ones, then those that hold least.

    Of equal ones the newest goes.
    """
    is_ready, ordinal_of = is_true(node, "Ready"), ordinal(name_of(node))
    return (is_ready, not is_unplaced(node), _held(node, known), -ordinal_of)


def _held(node: Manifest, known: Mapping[str, Member]) -> int:
    member = known.get(name_of(node))
    return 0 if member is None else member.held


@dataclass(slots=True)
class Sizers:
    """Sizers by pool."""

    _of: dict[str, Sizer] = field(default_factory=dict)

    def of(self, pool: EnvPool) -> Sizer:
        """The sizer of a pool, created at first use."""
        known = self._of.get(pool.metadata.uid)
        if known is None:
            known = self._of[pool.metadata.uid] = Sizer(Provisions(_prior(pool)))
        return known

    def forget(self, uid: str) -> None:
        """Drop the sizer of a deleted pool."""
        self._of.pop(uid, None)


def _prior(pool: EnvPool) -> Provision:
    """The provisioning times that an earlier operator recorded in the status."""
    told = pool.status.provision
    if told is None or not told.samples:
        return PRIOR
    return Provision(number(told.p50_seconds), number(told.p95_seconds))
