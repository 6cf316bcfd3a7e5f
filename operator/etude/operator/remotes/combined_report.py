"""Combined report of a pool, from the reports of its brokers."""

from collections import Counter
from collections.abc import Sequence

from etude.v1 import environments_pb2

Said = environments_pb2.WatchPoolResponse


def combine_reports(said: Sequence[Said]) -> Said | None:
    """One report for the whole pool; None before the first report of a broker.

    Brokers share the hosts: each counts the slots that the others have left it. Runs, leases and
    waiting environments are reported by one broker only.
    """
    if len(said) < 2:
        return next(iter(said), None)
    leased = sum(each.leased for each in said)
    return Said(
        sequence=sum(each.sequence for each in said),
        nodes=max(each.nodes for each in said),
        slots=max(each.slots + leased - each.leased for each in said),
        leased=leased,
        waiting=sum(each.waiting for each in said),
        granted_total=sum(each.granted_total for each in said),
        expired_total=sum(each.expired_total for each in said),
        driver=next((each.driver for each in said if each.driver), ""),
        isolation=min(
            (each.isolation for each in said if each.isolation),
            default=environments_pb2.ISOLATION_UNSPECIFIED,
        ),
        opening=sum(each.opening for each in said),
        ready=max(each.ready for each in said),
        planned=sum(each.planned for each in said),
        warm_percent=_warm_percent(said),
        # Quantiles have no sum: take those of the worst broker, whose runs wait so long.
        acquire_p50_ms=max(each.acquire_p50_ms for each in said),
        acquire_p99_ms=max(each.acquire_p99_ms for each in said),
        start_p50_ms=max(each.start_p50_ms for each in said),
        start_p95_ms=max(each.start_p95_ms for each in said),
        lease_p50_seconds=max(each.lease_p50_seconds for each in said),
        lease_p95_seconds=max(each.lease_p95_seconds for each in said),
        first_starts=_first_starts(said),
        leased_by_run=_leases_by_run(said),
    )


def _first_starts(said: Sequence[Said]) -> list[environments_pb2.FirstStarts]:
    """Start times of each template by the broker with most samples: quantiles have no sum."""
    found: dict[str, environments_pb2.FirstStarts] = {}
    for each in said:
        for told in each.first_starts:
            known = found.get(told.template)
            if known is None or known.count < told.count:
                found[told.template] = told
    return [found[name] for name in sorted(found)]


def _leases_by_run(said: Sequence[Said]) -> dict[str, int]:
    """Leases by run; one broker reports a run, or two while the run moves between them."""
    found: Counter[str] = Counter()
    for each in said:
        found.update(each.leased_by_run)
    return dict(found)


def _warm_percent(said: Sequence[Said]) -> int:
    """Mean share of warm starts, weighted by the leases of each broker."""
    granted = sum(each.granted_total for each in said)
    warm = sum(each.warm_percent * each.granted_total for each in said)
    return round(warm / granted) if granted else 0
