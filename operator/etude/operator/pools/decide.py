"""Decision about one pool: its brokers, its hosts and its status."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.autoscaling import ScalingMode
from etude.common.api.pool.status import EnvPoolStatus
from etude.common.api.status_types import Resolved
from etude.common.pools.pool_description import revision_of
from etude.operator import names
from etude.operator.actions import (
    Action,
    Apply,
    ClockReading,
    Decision,
    Delete,
    DrainHosts,
    UpdateBrokers,
)
from etude.operator.builders import pool as desired_pools
from etude.operator.builders.addresses import broker_addresses
from etude.operator.builders.platform import Platform
from etude.operator.builders.workload import keep_selector
from etude.operator.conditions import ConditionFact
from etude.operator.integrations import cert_manager
from etude.operator.manifests import Manifest, Ref, is_applied, is_deleting, labels, ref, uid
from etude.operator.pools import agent_sandbox
from etude.operator.pools.acceptance import pool_problem
from etude.operator.pools.autoscaling.config import TICK_S
from etude.operator.pools.observe import (
    ObservedPool,
    host_name,
    reported_hosts,
    staying_hosts,
)
from etude.operator.pools.size import PoolSize, requested_size
from etude.operator.pools.status import pool_status

_OVER = {"Failed", "Succeeded"}
_POOL = desired_pools.POOL_ENTRY
_PARTS = {"Service", "StatefulSet", "NetworkPolicy"}
"""Kinds of children that come and go with a field; hosts are counted, and the ConfigMap stays."""


def decide(
    pool: EnvPool,
    observed: ObservedPool,
    now: ClockReading,
    platform: Platform,
    size: PoolSize | None = None,
) -> Decision[EnvPoolStatus]:
    """One pass over one pool. No I/O, no clock.

    Args:
        pool: with its spec.
        observed: its observed state.
        now: both clocks.
        platform: configuration of the operator.
        size: of the pool's sizer; without one, the size that the spec asks for.
    """
    if pool.metadata.deletion_timestamp:
        return Decision(status=pool.status.model_copy(update={"phase": "Terminating"}))
    problem = (
        pool_problem(pool, platform)
        or agent_sandbox.sandbox_problem(
            pool, platform, served=observed.served, template=observed.sandbox_template
        )
        or cert_manager.cert_manager_problem(pool, platform.tls, observed.served)
    )
    if problem is None and pool.status.resolved is None:
        resolved = Resolved(images=dict(platform.images))
        return Decision(
            status=pool.status.model_copy(update={"resolved": resolved, "phase": "Pending"}),
            requeue_after_s=0.0,
        )
    size = size or requested_size(pool, observed)
    actions = () if problem is not None else tuple(_actions(pool, observed, size, platform))
    is_moving = pool.spec.mode is not ScalingMode.MANUAL or any(
        isinstance(a, DrainHosts) for a in actions
    )
    status = pool_status(pool, observed, size, now, problem)
    again_s = _requeue_after_s(problem, size, is_moving=is_moving)
    if cert_manager.is_cert_manager_missing(platform.tls, observed.served):
        soon_s = cert_manager.RETRY_S
        again_s = soon_s if again_s is None else min(again_s, soon_s)
    return Decision(
        status=status,
        actions=actions,
        requeue_after_s=again_s,
        is_transient=_differs_in_numbers(pool.status, status),
    )


def _requeue_after_s(
    problem: ConditionFact | None, size: PoolSize, *, is_moving: bool
) -> float | None:
    if agent_sandbox.is_waiting(problem):
        return agent_sandbox.RECHECK_S
    if is_moving:
        return TICK_S
    return size.findings.requeue_after_s


class _StatusText(NamedTuple):
    """A status without its numbers."""

    observed_generation: int
    phase: str
    facts: list[ConditionFact]


def _differs_in_numbers(before: EnvPoolStatus, after: EnvPoolStatus) -> bool:
    """Only numbers differ, as while hosts become ready one by one."""
    return _status_text(before) == _status_text(after)


def _status_text(status: EnvPoolStatus) -> _StatusText:
    facts = [
        ConditionFact(c.type, c.status == "True", c.reason, c.message) for c in status.conditions
    ]
    return _StatusText(status.observed_generation, status.phase, facts)


def desired_ordinals(hosts: Sequence[Manifest], limit: int) -> tuple[int, ...]:
    """Ordinals of the hosts that should exist: those that stay, and the lowest free ones.

    A terminating host still holds its ordinal.

    Args:
        hosts: existing hosts.
        limit: number of hosts up to which new ones are created.
    """
    taken = {_ordinal(host): host for host in hosts}
    kept = sorted(n for n, host in taken.items() if not is_deleting(host))
    free = (n for n in range(len(taken) + limit) if n not in taken)
    return tuple(sorted([*kept, *(next(free) for _ in range(limit - len(kept)))]))


def _ordinal(host: Manifest) -> int:
    return names.ordinal(host["metadata"]["name"])


def _actions(
    pool: EnvPool, observed: ObservedPool, size: PoolSize, platform: Platform
) -> Iterator[Action]:
    assert pool.status.resolved is not None, "recorded before"  # noqa: S101 - our own mistake
    new = () if observed.has_own_nodes else _new_ordinals(pool, observed, size)
    if observed.has_own_nodes:
        yield from _drain_earlier_hosts(pool, observed)
    else:
        yield from _remove_hosts(pool, observed, size)
    wanted = desired_pools.pool_children(
        pool, new, pool.status.resolved.images, platform, observed.sandbox_template
    )
    children = cert_manager.applicable_children(wanted, observed.served)
    for child in children:
        live = observed.children.get(ref(child))
        manifest = keep_selector(child, live)
        if live is None or not is_applied(live, manifest):
            yield Apply(manifest=manifest, manager=names.POOL_FIELD_MANAGER)
    yield from _prune(pool, observed, {ref(manifest) for manifest in children})
    yield from _update_brokers(pool, observed, children)


def _update_brokers(
    pool: EnvPool, observed: ObservedPool, children: Sequence[Manifest]
) -> Iterator[Action]:
    """The newest spec for the brokers that report another one; older releases report none."""
    texts = (each["data"].get(_POOL) for each in children if each["kind"] == "ConfigMap")
    text = next(filter(None, texts))
    targets = broker_addresses(pool.metadata.name, pool.spec.brokers)
    outdated = tuple(
        targets[number]
        for number, report in sorted(observed.report.by_broker.items())
        if number < len(targets) and report.response.pool_revision not in {"", revision_of(text)}
    )
    if outdated:
        yield UpdateBrokers(targets=outdated, pool_json=text)


def _new_ordinals(pool: EnvPool, observed: ObservedPool, size: PoolSize) -> tuple[int, ...]:
    """Ordinals of the hosts to create."""
    # A released pool keeps no host.
    hosts = [] if pool.spec.is_released else observed.hosts
    # A pod's spec is fixed at its creation: running hosts are left as they are.
    existing = {_ordinal(host) for host in observed.hosts}
    return tuple(each for each in desired_ordinals(hosts, size.limit) if each not in existing)


def _drain_earlier_hosts(pool: EnvPool, observed: ObservedPool) -> Iterator[Action]:
    """Draining of hosts that have less isolation than the chart's nodes, or another driver."""
    earlier = {ref(host): uid(host) for host in staying_hosts(observed.earlier_hosts)}
    if earlier:
        targets = broker_addresses(pool.metadata.name, pool.spec.brokers)
        yield DrainHosts(brokers=tuple(targets), hosts=earlier)


def _remove_hosts(pool: EnvPool, observed: ObservedPool, size: PoolSize) -> Iterator[Action]:
    """Deletion of hosts that are over or given up, and draining of those that retire."""
    retiring = {}
    for host in staying_hosts(observed.hosts):
        is_over = host.get("status", {}).get("phase") in _OVER
        if is_over or pool.spec.is_released or host_name(host) in size.findings.to_delete:
            yield Delete(ref=ref(host), uid=uid(host))
        elif host_name(host) in size.retiring:
            retiring[ref(host)] = uid(host)
    is_asked = any(member.is_draining for member in reported_hosts(observed.report).values())
    if (retiring or is_asked) and not pool.spec.is_released:
        # Also without any: hosts that no longer retire must get environments again.
        targets = broker_addresses(pool.metadata.name, pool.spec.brokers)
        yield DrainHosts(brokers=tuple(targets), hosts=retiring)


def _prune(pool: EnvPool, observed: ObservedPool, wanted: set[Ref]) -> Iterator[Delete]:
    """Children of parts that left the spec; objects that others gave this owner are kept."""
    # Labels of every part; some parts have the label of the pool's run as well.
    ours = {names.MANAGED_BY: names.MANAGER, names.POOL: pool.metadata.name}.items()
    for key, live in observed.children.items():
        is_part = key.kind in _PARTS and ours <= labels(live).items()
        if is_part and key not in wanted and not is_deleting(live):
            yield Delete(ref=key, uid=uid(live))
