"""Report of a broker on its pool, for the operator."""

import logging
import time
from collections import Counter
from collections.abc import Iterator

from etude.common.plans.registry import RunPlan
from etude.common.pools.run_ids import client_part
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.lease_ledger import AGE_STEP_S
from etude.envserver.broker.pool_statistics import quantile
from etude.v1 import environments_pb2, plan_pb2

log = logging.getLogger(__name__)

SHARES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Of the distribution of how long leases last."""
_ORIGIN_S = time.time() - time.monotonic()


def make_report(broker: Broker) -> environments_pb2.WatchPoolResponse:
    """The pool as it is now; the stream adds the fields that change with every report."""
    hosts = [host for host in broker.ledger.hosts if not host.draining]
    figures = broker.statistics
    return environments_pb2.WatchPoolResponse(
        nodes=len(hosts),
        slots=sum(host.slots for host in hosts),
        leased=len(broker.ledger.leases),
        waiting=len(broker.queue),
        granted_total=broker.ledger.granted_total,
        expired_total=broker.ledger.expired_total,
        driver=hosts[0].driver if hosts else "",
        isolation=min(
            (host.isolation for host in hosts), default=environments_pb2.ISOLATION_UNSPECIFIED
        ),
        acquire_p50_ms=quantile(figures.acquire_ms, 0.5),
        acquire_p99_ms=quantile(figures.acquire_ms, 0.99),
        opening=broker.ledger.hosts.opening,
        ready=sum(
            level.paused_clones for host in hosts for level in host.readiness_by_template.values()
        ),
        planned=broker.warm_targets.planned,
        warm_percent=figures.warm_percent,
        start_p50_ms=quantile(figures.start_ms, 0.5),
        start_p95_ms=quantile(figures.start_ms, 0.95),
        lease_p50_seconds=quantile(figures.lease_s, 0.5),
        lease_p95_seconds=quantile(figures.lease_s, 0.95),
        leased_by_run=_leased_by_run(broker),
        members=_members(broker),
        held=_held_figures(broker),
        plans=_plans(broker),
        lease_seconds=_lease_seconds(broker),
        first_starts=_first_starts(broker),
        preempted=broker.ledger.slots.num_preempted,
        unpreemptible_nodes=sum(not host.can_preempt for host in hosts),
        reserved=broker.queue.num_reserved(now_s=time.monotonic()),
    )


def unix_ms(at_s: float) -> int:
    """Convert a time of the monotonic clock to Unix milliseconds, unaffected by clock changes."""
    return round(1000 * (_ORIGIN_S + at_s))


def _members(broker: Broker) -> Iterator[environments_pb2.NodeFigures]:
    names = [template.name for template in broker.spec.templates]
    for host in broker.ledger.hosts:
        since_s = host.idle_since_s
        yield environments_pb2.NodeFigures(
            node_id=host.node_id,
            held=host.num_held,
            idle_since_unix_ms=0 if host.num_held or since_s is None else unix_ms(since_s),
            cached=all(host.readiness(name).resident for name in names),
            vacating=not host.is_open,
        )


def _leased_by_run(broker: Broker) -> dict[str, int]:
    """Leases by the run ids of clients, which do not say whose they are."""
    counts = Counter[str]()
    for run_id, count in broker.ledger.by_run.items():
        counts[client_part(run_id)] += count
    return dict(counts)


def _held_figures(broker: Broker) -> Iterator[environments_pb2.HeldFigures]:
    for (template, step), count in sorted(broker.ledger.began.items()):
        at_s = (step + 0.5) * AGE_STEP_S
        yield environments_pb2.HeldFigures(
            template=template, count=count, since_unix_ms=unix_ms(at_s)
        )


def _plans(broker: Broker) -> Iterator[environments_pb2.PlanFigures]:
    plans = broker.warm_targets.plans
    for run_id, plan in sorted(plans.current(now_s=time.monotonic()).items()):
        try:
            yield _plan(run_id, plan, plans.ratio(run_id))
        except (ValueError, OverflowError) as error:
            # One run's plan must not hide the other plans and the pool from the operator.
            log.warning("the plan of run %s cannot be reported: %s", run_id, error)


def _plan(run_id: str, plan: RunPlan, ratio: float) -> environments_pb2.PlanFigures:
    return environments_pb2.PlanFigures(
        run_id=client_part(run_id),
        version=plan.version,
        heard_unix_ms=unix_ms(plan.received_s),
        until_unix_ms=unix_ms(plan.until_s),
        ratio=ratio,
        waves=[
            environments_pb2.PlannedWave(
                template=wave.template,
                count=wave.count,
                start_unix_ms=unix_ms(wave.start_s),
                start_sigma_s=wave.sigma_s,
                lease_seconds=[
                    plan_pb2.LeaseQuantile(share=each.share, seconds=each.seconds)
                    for each in wave.lease
                ],
            )
            for wave in plan.waves
        ],
    )


def _first_starts(broker: Broker) -> Iterator[environments_pb2.FirstStarts]:
    for template, took_ms in sorted(broker.statistics.first_ms.items()):
        yield environments_pb2.FirstStarts(
            template=template,
            count=len(took_ms),
            p50_ms=quantile(took_ms, 0.5),
            p95_ms=quantile(took_ms, 0.95),
        )


def _lease_seconds(broker: Broker) -> Iterator[plan_pb2.LeaseQuantile]:
    newest = sorted(broker.statistics.lease_s)
    if not newest:
        return
    for share in SHARES:
        seconds = newest[min(len(newest) - 1, int(share * len(newest)))]
        if seconds > 0:
            yield plan_pb2.LeaseQuantile(share=share, seconds=seconds)
