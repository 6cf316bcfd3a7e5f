"""Autoscaler input of a pool, from its pods and its brokers' reports."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from etude.common.plans.forecast import Quantile, Wave
from etude.operator.actions import ClockReading
from etude.operator.manifests import Manifest, is_deleting, is_true
from etude.operator.pools.autoscaling.provisioning import ProvisionTime, add_first_start
from etude.operator.pools.autoscaling.values import HeldLeases, IdleReplica, PoolMetrics, RunPlan
from etude.operator.pools.health import is_unschedulable
from etude.operator.remotes.report_store import BrokerReport, PoolReport
from etude.v1 import environments_pb2, plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedHost:
    """Load of a host, by the reports of all brokers of its pool."""

    held: int = 0
    idle_since_s: float = -math.inf
    is_cached: bool = True
    is_draining: bool = False


def host_name(node: Manifest) -> str:
    """The name of a host, which is its pod's."""
    name: str = node["metadata"]["name"]
    return name


def staying_hosts(nodes: Sequence[Manifest]) -> list[Manifest]:
    """Hosts that are not terminating."""
    return [node for node in nodes if not is_deleting(node)]


def reported_hosts(report: PoolReport) -> dict[str, ReportedHost]:
    """Every host that a broker reports, by name."""
    found: dict[str, ReportedHost] = {}
    for words in report.by_broker.values():
        for told in words.response.members:
            known = found.get(told.node_id, ReportedHost())
            since_s = (
                words.to_local_s(told.idle_since_unix_ms) if told.idle_since_unix_ms else -math.inf
            )
            found[told.node_id] = ReportedHost(
                held=known.held + told.held,
                idle_since_s=max(known.idle_since_s, since_s),
                is_cached=known.is_cached and told.cached,
                is_draining=known.is_draining or told.vacating,
            )
    return found


def pool_metrics(
    nodes: Sequence[Manifest],
    report: PoolReport,
    *,
    brokers: int,
    provision: ProvisionTime,
    now: ClockReading,
) -> PoolMetrics:
    """Metrics of the pool now.

    Args:
        nodes: its pods.
        report: of its brokers.
        brokers: their number: unless all of them have reported nothing is known.
        provision: time that its hosts took to be ready.
        now: this moment.
    """
    there, known = staying_hosts(nodes), reported_hosts(report)
    ready = [host_name(node) for node in there if is_true(node, "Ready")]
    vacated = {host_name(node) for node in there if is_true(node, "DisruptionTarget")}
    words = report.by_broker.values()
    seen_s = min((each.received_s for each in words), default=-math.inf)
    return PoolMetrics(
        seen_s=seen_s if len(words) >= brokers else -math.inf,
        wall_s=now.wall_s,
        ready=len(ready),
        creating=len(there) - len(ready),
        unschedulable=sum(map(is_unschedulable, there)),
        terminating=len(nodes) - len(there),
        holding=sum(known[name].held > 0 for name in map(host_name, there) if name in known),
        leased=sum(each.response.leased + each.response.opening for each in words),
        queued=sum(each.response.waiting for each in words),
        holders=frozenset(run_id for each in words for run_id in each.response.leased_by_run),
        idle=tuple(
            IdleReplica(
                name=name,
                # A host that no broker reports yet is new and has held nothing.
                since_s=known[name].idle_since_s if name in known else now.monotonic_s,
                is_cached=name not in known or known[name].is_cached,
                is_draining=name in vacated,
            )
            for name in ready
            if name not in known or not known[name].held
        ),
        held=tuple(_held_leases(report, now)),
        lease=_lease_quantiles(report),
        provision=provision,
        provisions=_provisions(report, provision),
    )


def _provisions(report: PoolReport, provision: ProvisionTime) -> dict[str, ProvisionTime]:
    """Time until a new host has started its first environment of each template."""
    newest = report.newest
    return {
        told.template: add_first_start(
            provision, told.p50_ms / 1000, told.p95_ms / 1000, told.count
        )
        for told in (() if newest is None else newest.first_starts)
    }


def run_plans(report: PoolReport, asking: Mapping[str, int | None]) -> tuple[RunPlan, ...]:
    """Plans of the runs that may ask for environments.

    Args:
        report: of the brokers.
        asking: GPUs of each run, by uid; None for one that is suspended or over.
    """
    return tuple(
        RunPlan(
            run_id=told.run_id,
            version=told.version,
            heard_s=words.to_local_s(told.heard_unix_ms),
            until_s=words.to_local_s(told.until_unix_ms),
            waves=tuple(_wave(words, wave) for wave in told.waves),
            ratio=told.ratio,
            gpus=asking.get(told.run_id, 0) or 0,
        )
        for words in report.by_broker.values()
        for told in words.response.plans
        # An unknown run may belong to another operator.
        if asking.get(told.run_id, 0) is not None
    )


def _wave(words: BrokerReport, told: environments_pb2.PlannedWave) -> Wave:
    return Wave(
        template=told.template,
        count=told.count,
        start_s=words.to_local_s(told.start_unix_ms),
        sigma_s=told.start_sigma_s,
        lease=_quantiles(told.lease_seconds),
    )


def _held_leases(report: PoolReport, now: ClockReading) -> Iterator[HeldLeases]:
    for words in report.by_broker.values():
        for told in words.response.held:
            age_s = max(0.0, now.monotonic_s - words.to_local_s(told.since_unix_ms))
            yield HeldLeases(told.template, told.count, age_s)


def _lease_quantiles(report: PoolReport) -> tuple[Quantile, ...]:
    """Lease durations by the broker that knows most leases: quantiles have no sum."""
    told = max(
        (words.response for words in report.by_broker.values()), key=_knowledge, default=None
    )
    return () if told is None else _quantiles(told.lease_seconds)


def _knowledge(said: environments_pb2.WatchPoolResponse) -> tuple[int, int]:
    return len(said.lease_seconds), said.granted_total


def _quantiles(told: Sequence[plan_pb2.LeaseQuantile]) -> tuple[Quantile, ...]:
    return tuple(Quantile(each.share, each.seconds) for each in told)
