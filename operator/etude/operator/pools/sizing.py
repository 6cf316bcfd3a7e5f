"""How many nodes a pool should have now: decided here, or by somebody else."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from etude.common.api.autoscaling import ScalingMode
from etude.common.api.kinds import EnvPool
from etude.common.api.meta import number
from etude.operator.actions import Moment
from etude.operator.manifests import Manifest, is_true, uid
from etude.operator.names import ordinal
from etude.operator.pools.going import Going
from etude.operator.pools.health import Findings, Ward, is_unplaced
from etude.operator.pools.observed import Member, members, metrics, name_of, plans, staying
from etude.operator.pools.provisions import Provisions
from etude.operator.pools.settings import planning_config, pool_config
from etude.operator.reports.latest import PoolReport
from etude.operator.scaling.config import TICK_S
from etude.operator.scaling.decision import decide_pool, is_silent
from etude.operator.scaling.demand import outlook
from etude.operator.scaling.provision import PRIOR, Provision
from etude.operator.scaling.trust import usable
from etude.operator.scaling.values import Cause, PoolDecision, PoolState, restarted, resumed

FORGOTTEN_S = 30.0
"""Whoever has not decided for so long knows nothing of what was, as after a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many nodes there should be, and which of those that there are should go."""

    desired: int
    limit: int
    """Nodes up to which some may be created now: the rest waits for its turn."""
    retiring: tuple[str, ...] = ()
    """Nodes that get no more environments, and go once they hold none."""
    decision: PoolDecision | None = None
    """What led to it, where the operator decides."""
    plan_peak: int = 0
    """Slots that plans ask for of a pool in mode External, for whoever sizes it."""
    is_blind: bool = False
    """Whether its brokers are silent."""
    plan_version: int = 0
    """Of the newest plan that counted."""
    provision: Provision = PRIOR
    samples: int = 0
    """Nodes that provision was learnt from."""
    findings: Findings = field(default_factory=Findings)
    """What is to be done about nodes that are not well."""


class Told(NamedTuple):
    """What is known of a pool that somebody else sizes."""

    plan_peak: int
    is_blind: bool


@dataclass(slots=True)
class Sizer:
    """Decides for one pool, and remembers what the next decision needs."""

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
        """The size of a pool now; it changes at most every two seconds where we decide.

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
        """What whoever sizes the pool wants to know."""
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
        """Whether brokers were silent at the last decision."""
        last = None if self._size is None else self._size.decision
        return last is not None and last.cause is Cause.UNKNOWN


def tended(size: Size, findings: Findings, pool: EnvPool, *, present: int) -> Size:
    """The size of a pool some of whose nodes are not well, or find no machine.

    Args:
        size: of a pool without those that are not well.
        findings: about all of them.
        pool: the pool.
        present: all nodes that nobody has asked to go.
    """
    kept, gone = len(findings.quarantined), len(findings.given_up)
    if not size.desired:
        # Nothing is to be there, and nobody waits for what somebody might learn of it.
        every = (*findings.given_up, *findings.quarantined)
        return replace(size, findings=replace(findings, quarantined=(), given_up=every))
    limit = min(size.limit + kept, pool.spec.max_replicas or size.limit + kept)
    if findings.is_full:
        limit = min(limit, present - gone)
    return replace(size, limit=limit, findings=findings)


def asked_for(pool: EnvPool, nodes: Sequence[Manifest], report: PoolReport) -> Size:
    """What people, Kubernetes' own autoscaler or KEDA have set."""
    desired = pool.spec.asked_replicas
    there = staying(nodes)
    known = members(report)
    order = sorted(there, key=lambda node: _missed_least(node, known))
    retiring = tuple(name_of(node) for node in order[: max(0, len(there) - desired)])
    return Size(desired=desired, limit=desired, retiring=retiring)


def _withdrawn(nodes: Sequence[Manifest], report: PoolReport, count: int) -> tuple[str, ...]:
    """At most so many that are not ready; one that was, and holds something, is none of them."""
    known = members(report)
    order = sorted(
        (node for node in staying(nodes) if not is_true(node, "Ready") and not _held(node, known)),
        key=lambda node: _missed_least(node, known),
    )
    return tuple(name_of(node) for node in order[:count])


def _missed_least(node: Manifest, known: Mapping[str, Member]) -> tuple[float, ...]:
    """Those without a machine go first, then those that are not ready, then those that hold least.

    Of equals the newest goes.
    """
    is_ready, ordinal_of = is_true(node, "Ready"), ordinal(name_of(node))
    return (is_ready, not is_unplaced(node), _held(node, known), -ordinal_of)


def _held(node: Manifest, known: Mapping[str, Member]) -> int:
    member = known.get(name_of(node))
    return 0 if member is None else member.held


@dataclass(slots=True)
class Sizers:
    """Those of all pools."""

    _of: dict[str, Sizer] = field(default_factory=dict)

    def of(self, pool: EnvPool) -> Sizer:
        """The one of a pool."""
        known = self._of.get(pool.metadata.uid)
        if known is None:
            known = self._of[pool.metadata.uid] = Sizer(Provisions(_prior(pool)))
        return known

    def forget(self, uid: str) -> None:
        """The pool is gone."""
        self._of.pop(uid, None)


def _prior(pool: EnvPool) -> Provision:
    """What an operator before this one had found."""
    told = pool.status.provision
    if told is None or not told.samples:
        return PRIOR
    return Provision(number(told.p50_seconds), number(told.p95_seconds))
