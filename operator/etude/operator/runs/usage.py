"""Usage of a run against its budget, accumulated in its status so that it outlives operators."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.meta import number
from etude.common.api.run.status import Usage
from etude.operator.actions import Moment
from etude.operator.builders import run as desired
from etude.operator.clock import rfc3339, seconds
from etude.operator.manifests import Manifest

HOUR_S = 3_600.0
EVERY_S = 60.0
"""Least time between two writes of an unchanged usage."""


def accounted(
    run: RLRun, pods: Mapping[str, Sequence[Manifest]], sandboxes: int, now: Moment
) -> Usage:
    """The usage, with the time since the last write once that is worth another.

    Args:
        run: the run.
        pods: its pods by role.
        sandboxes: environments that it leases now.
        now: both clocks.
    """
    before, gpus = run.status.usage, _held(run, pods)
    elapsed_s = _elapsed_s(before, now)
    is_held = bool(gpus or sandboxes)
    # A clock that was set back is followed, or usage would stand still until it catches up.
    is_same = (gpus, sandboxes) == (before.gpus, before.sandboxes)
    if is_same and (not is_held or 0 <= elapsed_s < EVERY_S):
        return before
    passed_s = max(0.0, elapsed_s)
    return Usage(
        gpu_seconds=round(before.gpu_seconds + before.gpus * passed_s, 1),
        gpus=gpus,
        sandbox_seconds=round(before.sandbox_seconds + before.sandboxes * passed_s, 1),
        sandboxes=sandboxes,
        accounted_at=rfc3339(now.wall_s) if is_held else None,
    )


class Account(NamedTuple):
    """One limit of the budget, with its usage."""

    name: str
    hours: str | None
    seconds: float
    """Used until accountedAt."""
    held: int
    """In use since then."""


def left_s(run: RLRun, now: Moment) -> float | None:
    """Seconds that the budget lasts at the present usage; None without a limit.

    Zero or less once a limit is spent, even if nothing is in use.
    """
    return min((left for left, _ in _left(run, now)), default=None)


def spent(run: RLRun, now: Moment) -> str:
    """The spent limits of the budget as text; empty while none is."""
    return ", ".join(
        f"budget.{account.name} {account.hours}" for left, account in _left(run, now) if left <= 0
    )


def _left(run: RLRun, now: Moment) -> Iterator[tuple[float, Account]]:
    usage, budget = run.status.usage, run.spec.budget
    elapsed_s = max(0.0, _elapsed_s(usage, now))
    for account in (
        Account("gpuHours", budget.gpu_hours, usage.gpu_seconds, usage.gpus),
        Account("sandboxHours", budget.sandbox_hours, usage.sandbox_seconds, usage.sandboxes),
    ):
        if account.hours is None:
            continue
        left = number(account.hours) * HOUR_S - account.seconds - account.held * elapsed_s
        if account.held:
            left /= account.held
        elif left > 0:
            left = float("inf")
        yield left, account


def _elapsed_s(usage: Usage, now: Moment) -> float:
    return 0.0 if usage.accounted_at is None else now.wall_s - seconds(usage.accounted_at)


def _held(run: RLRun, pods: Mapping[str, Sequence[Manifest]]) -> int:
    return sum(
        desired.role_spec(run, role).gpus_per_replica
        for role in desired.roles(run)
        for _ in _on_nodes(pods.get(role, ()))
    )


def _on_nodes(pods: Sequence[Manifest]) -> Iterator[Manifest]:
    """Pods that hold devices, terminating ones included."""
    for pod in pods:
        is_over = pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
        if pod["spec"].get("nodeName") and not is_over:
            yield pod
