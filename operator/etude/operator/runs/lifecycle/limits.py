"""Time limits of a run: progress, verification and deadlines."""

from etude.common.api.kinds import RLRun
from etude.operator.actions import Moment
from etude.operator.clock import seconds
from etude.operator.reasons import Reason
from etude.operator.runs.observe import Seen
from etude.v1 import run_pb2

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

OVER = (run_pb2.RUN_STATE_SUSPENDED, run_pb2.RUN_STATE_DONE, run_pb2.RUN_STATE_FAILED)


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


def progress_left_s(run: RLRun, seen: Seen, now: Moment) -> float | None:
    """Seconds until the run counts as stalled; None while no progress is expected.

    A controller that waits for its store reports that. A new one would wait for the same store, and
    lose what is not durable yet. Once the store answers, the time starts again.
    """
    report = seen.report
    if not report.is_connected or report.status is None or report.status.state in OVER:
        return None
    if report.status.reason == Reason.STORAGE_UNAVAILABLE:
        return None
    return progress_limit_s(run, report.status) - (now.monotonic_s - report.progressed_s)


def verification_left_s(run: RLRun, seen: Seen, now: Moment) -> float:
    """Seconds that a finished run still waits for the verification of its final checkpoint."""
    since_done_s = now.monotonic_s - seen.report.progressed_s
    return run.spec.checkpointing.timeout_seconds - since_done_s


def deadlines_left_s(run: RLRun, seen: Seen, now: Moment) -> list[float]:
    """Seconds until each running deadline; negative for those that have passed."""
    deadlines, began = run.spec.deadlines, run.status.active.since
    if began is None:
        return []
    left = []
    # An operator that just started has no report yet; the status has what an earlier one heard.
    is_unheard = seen.report.status is None and run.status.step is None
    if deadlines.pre_running_seconds is not None and is_unheard:
        left.append(deadlines.pre_running_seconds - (now.wall_s - seconds(began)))
    if deadlines.active_seconds is not None:
        left.append(deadlines.active_seconds - active_s(run, now.wall_s))
    return left


def active_s(run: RLRun, wall_s: float) -> float:
    """Seconds that the run has held pods."""
    active = run.status.active
    running = max(0.0, wall_s - seconds(active.since)) if active.since else 0.0
    return round(active.seconds + running, 1)
