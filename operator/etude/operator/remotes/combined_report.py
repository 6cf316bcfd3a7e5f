"""Combined report of a pool, from the reports of its brokers."""

from collections import Counter
from collections.abc import Sequence

from etude.v1 import environments_pb2

Report = environments_pb2.WatchPoolResponse


def combine_reports(reports: Sequence[Report]) -> Report | None:
    """One report for the whole pool; None before the first report of a broker.

    A host and its leases belong to one broker; a run may have environments at all.
    """
    if len(reports) < 2:
        return next(iter(reports), None)
    return Report(
        sequence=sum(report.sequence for report in reports),
        nodes=sum(report.nodes for report in reports),
        slots=sum(report.slots for report in reports),
        leased=sum(report.leased for report in reports),
        waiting=sum(report.waiting for report in reports),
        granted_total=sum(report.granted_total for report in reports),
        expired_total=sum(report.expired_total for report in reports),
        driver=next((report.driver for report in reports if report.driver), ""),
        isolation=min(
            (report.isolation for report in reports if report.isolation),
            default=environments_pb2.ISOLATION_UNSPECIFIED,
        ),
        opening=sum(report.opening for report in reports),
        ready=sum(report.ready for report in reports),
        planned=sum(report.planned for report in reports),
        warm_percent=_warm_percent(reports),
        # Quantiles have no sum: take those of the worst broker, whose runs wait so long.
        acquire_p50_ms=max(report.acquire_p50_ms for report in reports),
        acquire_p99_ms=max(report.acquire_p99_ms for report in reports),
        start_p50_ms=max(report.start_p50_ms for report in reports),
        start_p95_ms=max(report.start_p95_ms for report in reports),
        lease_p50_seconds=max(report.lease_p50_seconds for report in reports),
        lease_p95_seconds=max(report.lease_p95_seconds for report in reports),
        first_starts=_first_starts(reports),
        leased_by_run=_leases_by_run(reports),
        preempted=sum(report.preempted for report in reports),
        unpreemptible_nodes=sum(report.unpreemptible_nodes for report in reports),
        reserved=sum(report.reserved for report in reports),
    )


def _first_starts(reports: Sequence[Report]) -> list[environments_pb2.FirstStarts]:
    """Start times of report template by the broker with most samples: quantiles have no sum."""
    found: dict[str, environments_pb2.FirstStarts] = {}
    for report in reports:
        for starts in report.first_starts:
            known = found.get(starts.template)
            if known is None or known.count < starts.count:
                found[starts.template] = starts
    return [found[name] for name in sorted(found)]


def _leases_by_run(reports: Sequence[Report]) -> dict[str, int]:
    """Leases of each run at all brokers together."""
    found: Counter[str] = Counter()
    for report in reports:
        found.update(report.leased_by_run)
    return dict(found)


def _warm_percent(reports: Sequence[Report]) -> int:
    """Mean share of warm starts, weighted by the leases of report broker."""
    granted = sum(report.granted_total for report in reports)
    warm = sum(report.warm_percent * report.granted_total for report in reports)
    return round(warm / granted) if granted else 0
