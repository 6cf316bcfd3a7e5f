"""Limits of a run: progress, verification, deadlines, and usage against its budget."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.meta import number
from etude.common.api.run.status import Usage
from etude.operator.actions import ClockReading
from etude.operator.builders import run_spec
from etude.operator.clock import parse_rfc3339, rfc3339
from etude.operator.manifests import Manifest
from etude.operator.reasons import Reason
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2

HOUR_S = 3_600.0
WRITE_EVERY_S = 60.0
"""Least time between two writes of an unchanged usage."""

FIRST_STEPS = 10
FIRST_STEPS_LIMIT_S = 3_600.0
"""Limit before FIRST_STEPS steps were measured, and for a controller before its own first step: it
loads, and waits for engines that load."""
LEAST_PROGRESS_LIMIT_S = 300.0
CHECKPOINT_MARGIN_S = 30.0
"""The controller reports a checkpoint that takes too long before this counts as a stall."""
EVALUATION_LIMIT_S = 3_600.0
"""Silence of an evaluation; its controller may count nothing before the last task is scored."""
STEPS_WITHOUT_PROGRESS = 3
"""Slowest steps that may pass without one finishing."""

SILENCE_LIMIT_S = 30.0
"""A controller whose pod is Ready must report within this, or it is treated as gone."""

FINISHED_STATES = (run_pb2.RUN_STATE_SUSPENDED, run_pb2.RUN_STATE_DONE, run_pb2.RUN_STATE_FAILED)


def progress_limit_s(run: RLRun, status: run_pb2.RunStatus) -> float:
    """Seconds that the run may take without finishing a step or a rollout.

    A checkpoint and an evaluation finish neither: a checkpoint has a time-out of its own, and so
    has every rollout of an evaluation.
    """
    match status.state:
        case run_pb2.RUN_STATE_CHECKPOINTING:
            least_s = run.spec.checkpointing.timeout_seconds + CHECKPOINT_MARGIN_S
        case run_pb2.RUN_STATE_EVALUATING:
            least_s = EVALUATION_LIMIT_S
        case _:
            least_s = 0.0
    if not status.last_step_unix_ms:  # by this controller, whatever those before it did
        least_s = max(least_s, FIRST_STEPS_LIMIT_S)
    return max(least_s, _step_limit_s(run, status))


def _step_limit_s(run: RLRun, status: run_pb2.RunStatus) -> float:
    given = run.spec.deadlines.step_progress_seconds
    if given is not None:
        return float(given)
    if status.step < FIRST_STEPS:
        return FIRST_STEPS_LIMIT_S
    measured_s = STEPS_WITHOUT_PROGRESS * status.step_seconds_p99
    # A step ends with a publication, whose own limit is the controller's to report.
    return max(LEAST_PROGRESS_LIMIT_S, run.spec.weights.timeout_seconds, measured_s)


def progress_left_s(run: RLRun, observed: ObservedRun, now: ClockReading) -> float | None:
    """Seconds until the run counts as stalled; None while no progress is expected.

    A controller that waits for its store reports that. A new one would wait for the same store, and
    lose what is not durable yet. Once the store answers, the time starts again.
    """
    report = observed.report
    if not report.is_connected or report.status is None or report.status.state in FINISHED_STATES:
        return None
    if report.status.reason in {Reason.STORAGE_UNAVAILABLE, Reason.WAITING_FOR_WINDOW}:
        return None
    return progress_limit_s(run, report.status) - (now.monotonic_s - report.last_progress_s)


def verification_left_s(run: RLRun, observed: ObservedRun, now: ClockReading) -> float:
    """Seconds that a finished run still waits for the verification of its final checkpoint."""
    since_done_s = now.monotonic_s - observed.report.last_progress_s
    return run.spec.checkpointing.timeout_seconds - since_done_s


def deadlines_left_s(run: RLRun, observed: ObservedRun, now: ClockReading) -> list[float]:
    """Seconds until each running deadline; negative for those that have passed."""
    deadlines, began = run.spec.deadlines, run.status.active.since
    if began is None:
        return []
    left = []
    # An operator that just started has no report yet; the status has what an earlier one heard.
    is_unheard = observed.report.status is None and run.status.step is None
    if deadlines.pre_running_seconds is not None and is_unheard:
        left.append(deadlines.pre_running_seconds - (now.wall_s - parse_rfc3339(began)))
    if deadlines.active_seconds is not None:
        left.append(deadlines.active_seconds - active_s(run, now.wall_s))
    return left


def active_s(run: RLRun, wall_s: float) -> float:
    """Seconds that the run has held pods."""
    active = run.status.active
    running = max(0.0, wall_s - parse_rfc3339(active.since)) if active.since else 0.0
    return round(active.seconds + running, 1)


def account_usage(
    run: RLRun, pods: Mapping[str, Sequence[Manifest]], sandboxes: int, now: ClockReading
) -> Usage:
    """The usage, with the time since the last write once that is worth another.

    Args:
        run: the run.
        pods: its pods by role.
        sandboxes: environments that it leases now.
        now: both clocks.
    """
    usage, gpus = run.status.usage, _held_gpus(run, pods)
    elapsed_s = _elapsed_s(usage, now)
    is_held = bool(gpus or sandboxes)
    # A clock that was set back is followed, or usage would stand still until it catches up.
    is_same = (gpus, sandboxes) == (usage.gpus, usage.sandboxes)
    if is_same and (not is_held or 0 <= elapsed_s < WRITE_EVERY_S):
        return usage
    passed_s = max(0.0, elapsed_s)
    return Usage(
        gpu_seconds=round(usage.gpu_seconds + usage.gpus * passed_s, 1),
        gpus=gpus,
        sandbox_seconds=round(usage.sandbox_seconds + usage.sandboxes * passed_s, 1),
        sandboxes=sandboxes,
        accounted_at=rfc3339(now.wall_s) if is_held else None,
    )


class BudgetAccount(NamedTuple):
    """One limit of the budget, with its usage."""

    name: str
    hours: str | None
    seconds: float
    """Used until accountedAt."""
    in_use: int
    """In use since then."""


def budget_left_s(run: RLRun, now: ClockReading) -> float | None:
    """Seconds that the budget lasts at the present usage; None without a limit.

    Zero or less once a limit is spent, even if nothing is in use.
    """
    return min((left for left, _ in _accounts_left(run, now)), default=None)


def spent_limits(run: RLRun, now: ClockReading) -> str:
    """The spent limits of the budget as text; empty while none is."""
    return ", ".join(
        f"budget.{account.name} {account.hours}"
        for left, account in _accounts_left(run, now)
        if left <= 0
    )


def _accounts_left(run: RLRun, now: ClockReading) -> Iterator[tuple[float, BudgetAccount]]:
    usage, budget = run.status.usage, run.spec.budget
    elapsed_s = max(0.0, _elapsed_s(usage, now))
    for account in (
        BudgetAccount("gpuHours", budget.gpu_hours, usage.gpu_seconds, usage.gpus),
        BudgetAccount("sandboxHours", budget.sandbox_hours, usage.sandbox_seconds, usage.sandboxes),
    ):
        if account.hours is None:
            continue
        left = number(account.hours) * HOUR_S - account.seconds - account.in_use * elapsed_s
        if account.in_use:
            left /= account.in_use
        elif left > 0:
            left = float("inf")
        yield left, account


def _elapsed_s(usage: Usage, now: ClockReading) -> float:
    return 0.0 if usage.accounted_at is None else now.wall_s - parse_rfc3339(usage.accounted_at)


def _held_gpus(run: RLRun, pods: Mapping[str, Sequence[Manifest]]) -> int:
    return sum(
        run_spec.role_spec(run, role).gpus_per_replica
        for role in run_spec.pods_by_role(run)
        for _ in _pods_on_nodes(pods.get(role, ()))
    )


def _pods_on_nodes(pods: Sequence[Manifest]) -> Iterator[Manifest]:
    """Pods that hold devices, terminating ones included."""
    for pod in pods:
        is_over = pod.get("status", {}).get("phase") in {"Succeeded", "Failed"}
        if pod["spec"].get("nodeName") and not is_over:
            yield pod
