"""Cleanup of children: of a finished run by TTL and deletion policy, and of parts that left."""

from collections.abc import Iterator, Set

from etude.common.api.kinds import RLRun
from etude.operator.actions import ClockReading, Delete
from etude.operator.builders import run_spec
from etude.operator.clock import parse_rfc3339
from etude.operator.manifests import NEVER_DELETED, Manifest, Ref, is_deleting, labels, uid
from etude.operator.runs.observe import ObservedRun

_KINDS = {
    "DeleteRoles": (
        *("StatefulSet", "JobSet", "RayCluster", "Workload"),
        *("Service", "HTTPRoute", "PodDisruptionBudget"),
    ),
    "DeletePools": ("EnvPool",),
}


def due_deletions(
    run: RLRun, observed: ObservedRun, ending: str, now: ClockReading
) -> list[Delete]:
    """Objects whose time to live is over and that still exist.

    Args:
        run: a finished run.
        observed: its children.
        ending: Complete or Failed.
        now: both clocks.
    """
    due = {policy for policy, left_s in _policies_left(run, ending, now) if left_s <= 0}
    if "DeleteSelf" in due:
        key = Ref("RLRun", run.metadata.namespace, run.metadata.name)
        return [Delete(ref=key, uid=run.metadata.uid)]
    kinds = {kind for policy in due for kind in _KINDS[policy]}
    return list(_delete_kinds(run, observed, kinds))


def next_deletion_s(run: RLRun, ending: str, now: ClockReading) -> float | None:
    """Seconds until the next deletion is due."""
    return min(
        (left_s for _, left_s in _policies_left(run, ending, now) if left_s > 0), default=None
    )


def _policies_left(run: RLRun, ending: str, now: ClockReading) -> Iterator[tuple[str, float]]:
    """Each deletion policy with its seconds left; none before completionTime is recorded."""
    if run.status.completion_time is None:
        return
    since_s = now.wall_s - parse_rfc3339(run.status.completion_time)
    if run.spec.ttl_seconds_after_finished is not None:
        yield "DeleteSelf", run.spec.ttl_seconds_after_finished - since_s
    for rule in run.spec.deletion_rules:
        if rule.after == ending:
            yield rule.policy, rule.ttl_seconds - since_s


def prune(run: RLRun, observed: ObservedRun, wanted: Set[Ref]) -> Iterator[Delete]:
    """Deletion of children whose part left the spec; objects that others gave this owner stay."""
    for key, live in _live_parts(run, observed):
        if key.kind not in NEVER_DELETED and key not in wanted:
            yield Delete(ref=key, uid=uid(live))


def _delete_kinds(run: RLRun, observed: ObservedRun, kinds: Set[str]) -> Iterator[Delete]:
    for key, live in _live_parts(run, observed):
        if key.kind in kinds:
            yield Delete(ref=key, uid=uid(live))


def _live_parts(run: RLRun, observed: ObservedRun) -> Iterator[tuple[Ref, Manifest]]:
    ours = run_spec.run_labels(run).items()
    for key, live in observed.children.items():
        if ours <= labels(live).items() and not is_deleting(live):
            yield key, live
