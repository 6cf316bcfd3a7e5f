"""What a pool looks like to its autoscaler, from its pods and from what its brokers say."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from etude.common.plans.forecast import Quantile, Wave
from etude.operator.actions import Moment
from etude.operator.manifests import Manifest, is_deleting, is_true
from etude.operator.pools.health import is_unplaced
from etude.operator.reports.latest import PoolReport, Words
from etude.operator.scaling.provision import Provision, followed
from etude.operator.scaling.values import Held, IdleReplica, Plan, PoolMetrics
from etude.v1 import environments_pb2, plan_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node, as all brokers of its pool see it together."""

    held: int = 0
    idle_since_s: float = -math.inf
    is_cached: bool = True
    is_vacating: bool = False


def name_of(node: Manifest) -> str:
    """A node's name, which is its pod's."""
    name: str = node["metadata"]["name"]
    return name


def staying(nodes: Sequence[Manifest]) -> list[Manifest]:
    """Those that nobody has asked to go."""
    return [node for node in nodes if not is_deleting(node)]


def members(report: PoolReport) -> dict[str, Member]:
    """Every node that a broker knows, by name."""
    found: dict[str, Member] = {}
    for words in report.said.values():
        for told in words.said.members:
            known = found.get(told.node_id, Member())
            since_s = words.at_s(told.idle_since_unix_ms) if told.idle_since_unix_ms else -math.inf
            found[told.node_id] = Member(
                held=known.held + told.held,
                idle_since_s=max(known.idle_since_s, since_s),
                is_cached=known.is_cached and told.cached,
                is_vacating=known.is_vacating or told.vacating,
            )
    return found


def metrics(
    nodes: Sequence[Manifest],
    report: PoolReport,
    *,
    brokers: int,
    provision: Provision,
    now: Moment,
) -> PoolMetrics:
    """The pool as it is now.

    Args:
        nodes: its pods.
        report: what its brokers said.
        brokers: how many it has: unless all of them have spoken nothing is known.
        provision: how long its nodes took to be ready.
        now: this moment.
    """
    there, known = staying(nodes), members(report)
    ready = [name_of(node) for node in there if is_true(node, "Ready")]
    vacated = {name_of(node) for node in there if is_true(node, "DisruptionTarget")}
    words = report.said.values()
    seen_s = min((each.heard_s for each in words), default=-math.inf)
    return PoolMetrics(
        seen_s=seen_s if len(words) >= brokers else -math.inf,
        wall_s=now.wall_s,
        ready=len(ready),
        creating=len(there) - len(ready),
        unplaced=sum(map(is_unplaced, there)),
        terminating=len(nodes) - len(there),
        holding=sum(known[name].held > 0 for name in map(name_of, there) if name in known),
        leased=sum(each.said.leased + each.said.opening for each in words),
        queued=sum(each.said.waiting for each in words),
        holders=frozenset(run_id for each in words for run_id in each.said.leased_by_run),
        idle=tuple(
            IdleReplica(
                name=name,
                # What no broker knows yet has held nothing: it has only just come.
                since_s=known[name].idle_since_s if name in known else now.monotonic_s,
                is_cached=name not in known or known[name].is_cached,
                is_draining=name in vacated,
            )
            for name in ready
            if name not in known or not known[name].held
        ),
        held=tuple(_held(report, now)),
        lease=_lease(report),
        provision=provision,
        provisions=_provisions(report, provision),
    )


def _provisions(report: PoolReport, provision: Provision) -> dict[str, Provision]:
    """Until a new node has given its first environment of each template, which it fetches then."""
    newest = report.newest
    return {
        told.template: followed(provision, told.p50_ms / 1000, told.p95_ms / 1000, told.count)
        for told in (() if newest is None else newest.first_starts)
    }


def plans(report: PoolReport, asking: Mapping[str, int | None]) -> tuple[Plan, ...]:
    """What runs that may ask for something have planned.

    Args:
        report: what brokers said.
        asking: GPUs of each run, by uid; None for one that is suspended or over.
    """
    return tuple(
        Plan(
            run_id=told.run_id,
            version=told.version,
            heard_s=words.at_s(told.heard_unix_ms),
            until_s=words.at_s(told.until_unix_ms),
            waves=tuple(_wave(words, wave) for wave in told.waves),
            ratio=told.ratio,
            gpus=asking.get(told.run_id, 0) or 0,
        )
        for words in report.said.values()
        for told in words.said.plans
        # A run that is unknown here may be one of another operator.
        if asking.get(told.run_id, 0) is not None
    )


def _wave(words: Words, told: environments_pb2.PlannedWave) -> Wave:
    return Wave(
        template=told.template,
        count=told.count,
        start_s=words.at_s(told.start_unix_ms),
        sigma_s=told.start_sigma_s,
        lease=_quantiles(told.lease_seconds),
    )


def _held(report: PoolReport, now: Moment) -> Iterator[Held]:
    for words in report.said.values():
        for told in words.said.held:
            age_s = max(0.0, now.monotonic_s - words.at_s(told.since_unix_ms))
            yield Held(told.template, told.count, age_s)


def _lease(report: PoolReport) -> tuple[Quantile, ...]:
    """Of the broker that knows most leases: of quantiles there is no sum."""
    told = max((words.said for words in report.said.values()), key=_knowledge, default=None)
    return () if told is None else _quantiles(told.lease_seconds)


def _knowledge(said: environments_pb2.WatchPoolResponse) -> tuple[int, int]:
    return len(said.lease_seconds), said.granted_total


def _quantiles(told: Sequence[plan_pb2.LeaseQuantile]) -> tuple[Quantile, ...]:
    return tuple(Quantile(each.share, each.seconds) for each in told)
