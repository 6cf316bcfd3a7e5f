"""Final checkpoint of a run that is being suspended or is about to fail."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Intent
from etude.operator import names
from etude.operator.actions import ClockReading
from etude.operator.clock import parse_rfc3339
from etude.operator.reasons import Reason
from etude.operator.runs.lifecycle import limits, transitions
from etude.operator.runs.lifecycle.transitions import RunTransition
from etude.operator.runs.observe import ObservedRun

HALT_LIMIT_S = 30.0
"""Time for a controller to stop without saving."""


def continue_suspension(
    run: RLRun, current: Intent, observed: ObservedRun, now: ClockReading
) -> RunTransition:
    """Wait for the checkpoint, then release the pods; a release is never cancelled."""
    limit_s = run.spec.checkpointing.timeout_seconds
    if now.wall_s - parse_rfc3339(current.since) > limit_s:
        message = f"no verified checkpoint within {limit_s} s; the last one is used"
        return transitions.transition(run, "Release", Reason.SUSPEND_TIMEOUT, message, now)
    if _has_saved(run, observed, now):
        return transitions.transition(run, "Release", current.reason, current.message, now)
    return RunTransition(current)


def _has_saved(run: RLRun, observed: ObservedRun, now: ClockReading) -> bool:
    """A run that is being suspended has saved all that it can."""
    if run.spec.checkpointing.on_suspend == "Skip":
        return True
    if not observed.num_ready(
        names.TRAINER, attempt=transitions.attempts_of(run).get(names.TRAINER, 0)
    ):
        return True  # nothing that could still be saved
    report = observed.report
    if not report.is_connected:
        return _silence_s(run, observed, now) > limits.SILENCE_LIMIT_S
    is_over = report.status is not None and report.status.state in limits.FINISHED_STATES
    return is_over and observed.is_registered and observed.has_saved


def save_before_failure(
    run: RLRun, observed: ObservedRun, outcome: RunTransition, now: ClockReading
) -> RunTransition:
    """The transition, with Salvage in place of Fail for a run that can still save."""
    intent = outcome.intent
    if intent is None or intent.type != "Fail" or not _is_training(run, observed):
        return outcome
    left_s = limits.progress_left_s(run, observed, now)
    if left_s is not None and left_s <= 0:
        return outcome  # it finishes no step, and between steps is where it saves
    return RunTransition(intent.model_copy(update={"type": "Salvage"}), outcome.failure)


def finish_saving(
    run: RLRun, current: Intent, observed: ObservedRun, now: ClockReading
) -> RunTransition:
    """The failure, once the final checkpoint is saved or cannot be."""
    elapsed_s = now.wall_s - parse_rfc3339(current.since)
    report = observed.report.status
    is_over = report is not None and report.state in limits.FINISHED_STATES
    if _is_training(run, observed) and elapsed_s <= salvage_limit_s(run):
        return RunTransition(current)
    if is_over and not observed.is_registered and elapsed_s <= salvage_limit_s(run):
        return RunTransition(current)
    return RunTransition(current.model_copy(update={"type": "Fail"}))


def salvage_limit_s(run: RLRun) -> float:
    """Seconds that the failure waits for the checkpoint."""
    wanted = run.spec.checkpointing
    return float(wanted.timeout_seconds) if wanted.on_failure == "BestEffort" else HALT_LIMIT_S


def _is_training(run: RLRun, observed: ObservedRun) -> bool:
    """The controller reports and still trains."""
    report = observed.report
    attempt = transitions.attempts_of(run).get(names.TRAINER, 0)
    return (
        report.is_current
        and report.status is not None
        and report.status.state not in limits.FINISHED_STATES
        and observed.num_ready(names.TRAINER, attempt=attempt) > 0
    )


def _silence_s(run: RLRun, observed: ObservedRun, now: ClockReading) -> float:
    """Seconds since the controller's last report, counted from the suspension at the earliest."""
    intent = run.status.intent
    since_intent = now.wall_s - parse_rfc3339(intent.since) if intent else 0.0
    silent = observed.report.disconnected_since_s
    return 0.0 if silent is None else min(since_intent, now.monotonic_s - silent)
