"""What a run uses, added up in its status so that it outlives operators."""

from collections.abc import Iterator, Mapping, Sequence

from etude.common.api.kinds import RLRun
from etude.common.api.meta import number
from etude.common.api.status import Usage
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339, seconds
from etude.operator.desired import runs as desired
from etude.operator.manifests import Manifest

HOUR_S = 3_600.0
EVERY_S = 60.0
"""While nothing else changes, it is written no more often."""


def accounted(run: RLRun, pods: Mapping[str, Sequence[Manifest]], now: Moment) -> Usage:
    """The usage with the time since it was added up last, once that is worth a write."""
    before, held = run.status.usage, _held(run, pods)
    elapsed_s = _elapsed_s(before, now)
    # A clock that was set back is followed at once, or time would stand still until it is there.
    if held == before.gpus and (not held or 0 <= elapsed_s < EVERY_S):
        return before
    return Usage(
        gpu_seconds=round(before.gpu_seconds + before.gpus * max(0.0, elapsed_s), 1),
        gpus=held,
        accounted_at=rfc3339(now.wall_s) if held else None,
    )


def left_s(run: RLRun, now: Moment) -> float | None:
    """Seconds for which the budget still lasts with the GPUs that are held; None without a limit.

    Zero or less once it is spent, also when nothing is held.
    """
    given = run.spec.budget.gpu_hours
    if given is None:
        return None
    usage = run.status.usage
    spent_s = usage.gpu_seconds + usage.gpus * max(0.0, _elapsed_s(usage, now))
    left = number(given) * HOUR_S - spent_s
    if usage.gpus:
        return left / usage.gpus
    return float("inf") if left > 0 else left


def _elapsed_s(usage: Usage, now: Moment) -> float:
    return 0.0 if usage.accounted_at is None else now.wall_s - seconds(usage.accounted_at)


def _held(run: RLRun, pods: Mapping[str, Sequence[Manifest]]) -> int:
    return sum(
        desired.role_spec(run, role).gpus_per_replica
        for role in desired.roles(run)
        for _ in _on_nodes(pods.get(role, ()))
    )


def _on_nodes(pods: Sequence[Manifest]) -> Iterator[Manifest]:
    """Pods whose devices nobody else can have: also those on their way out."""
    for pod in pods:
        is_over = pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
        if pod["spec"].get("nodeName") and not is_over:
            yield pod
