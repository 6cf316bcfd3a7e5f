"""Final checkpoint of a run that is about to fail."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Intent
from etude.operator import names
from etude.operator.actions import ClockReading
from etude.operator.clock import parse_rfc3339
from etude.operator.runs.lifecycle import limits, transitions
from etude.operator.runs.lifecycle.transitions import RunTransition
from etude.operator.runs.observe import ObservedRun

HALT_LIMIT_S = 30.0
"""Time for a controller to stop without saving."""


def save_before_failure(
    run: RLRun, seen: ObservedRun, outcome: RunTransition, now: ClockReading
) -> RunTransition:
    """The transition, with Salvage in place of Fail for a run that can still save."""
    intent = outcome.intent
    if intent is None or intent.type != "Fail" or not _is_training(run, seen):
        return outcome
    left_s = limits.progress_left_s(run, seen, now)
    if left_s is not None and left_s <= 0:
        return outcome  # it finishes no step, and between steps is where it saves
    return RunTransition(intent.model_copy(update={"type": "Salvage"}), outcome.failure)


def finish_saving(
    run: RLRun, current: Intent, seen: ObservedRun, now: ClockReading
) -> RunTransition:
    """The failure, once the final checkpoint is saved or cannot be."""
    elapsed_s = now.wall_s - parse_rfc3339(current.since)
    report = seen.report.status
    is_over = report is not None and report.state in limits.FINISHED_STATES
    if _is_training(run, seen) and elapsed_s <= salvage_limit_s(run):
        return RunTransition(current)
    if is_over and not seen.is_registered and elapsed_s <= salvage_limit_s(run):
        return RunTransition(current)
    return RunTransition(current.model_copy(update={"type": "Fail"}))


def salvage_limit_s(run: RLRun) -> float:
    """Seconds that the failure waits for the checkpoint."""
    wanted = run.spec.checkpointing
    return float(wanted.timeout_seconds) if wanted.on_failure == "BestEffort" else HALT_LIMIT_S


def _is_training(run: RLRun, seen: ObservedRun) -> bool:
    """The controller reports and still trains."""
    report = seen.report
    attempt = transitions.attempts_of(run).get(names.TRAINER, 0)
    return (
        report.is_current
        and report.status is not None
        and report.status.state not in limits.FINISHED_STATES
        and seen.num_ready(names.TRAINER, attempt=attempt) > 0
    )
