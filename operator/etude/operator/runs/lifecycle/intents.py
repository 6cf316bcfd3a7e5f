"""Intents of a run: state transitions that are decided once, recorded, then carried out."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Failure, Intent
from etude.operator import names
from etude.operator.actions import ClockReading
from etude.operator.checkpoints.status import is_corrupt, is_ready
from etude.operator.clock import rfc3339
from etude.operator.manifests import Manifest, is_deleting, labels
from etude.operator.reasons import Reason
from etude.operator.runs.capacity import kueue
from etude.operator.runs.lifecycle import (
    failure_policy,
    final_checkpoint,
    holds,
    limits,
    transitions,
)
from etude.operator.runs.lifecycle.transitions import RunTransition
from etude.operator.runs.observe import ObservedRun
from etude.v1 import run_pb2


def next_transition(run: RLRun, observed: ObservedRun, now: ClockReading) -> RunTransition:
    """The present intent until it is carried out, then the next one."""
    current = run.status.intent
    if current is None:
        return final_checkpoint.save_before_failure(
            run, observed, _first_transition(run, observed, now), now
        )
    match current.type:
        case "Suspend":
            return _continue_suspension(run, current, observed, now)
        case "Release":
            return RunTransition(None if observed.has_no_pods else current)
        case "Restart":
            return _continue_restart(run, current, observed, now)
        case "Salvage":
            return final_checkpoint.finish_saving(run, current, observed, now)
        case "Fail" | "Complete":
            return RunTransition(current)


def _first_transition(run: RLRun, observed: ObservedRun, now: ClockReading) -> RunTransition:
    outcome = _reported_end(run, observed, now)
    if outcome.intent is not None:
        return outcome
    if run.spec.suspend:
        return RunTransition(None if observed.has_no_pods else _user_suspension(run, now))
    hold = run.status.hold
    if hold is not None:
        again = transitions.new_intent(run, "Suspend", hold.reason, hold.message, now)
        return RunTransition(None if observed.has_no_pods else again)
    quota = kueue.quota_state(run, observed)
    if quota.is_evicted:
        return transitions.transition(run, "Suspend", Reason.EVICTED, quota.message, now)
    return (
        failure_policy.failure_transition(run, observed, now)
        or failure_policy.deadline_transition(run, observed, now)
        or failure_policy.stall_transition(run, observed, now)
        or failure_policy.budget_transition(run, now)
        or RunTransition(None)
    )


def _continue_suspension(
    run: RLRun, current: Intent, observed: ObservedRun, now: ClockReading
) -> RunTransition:
    """The reported end of the run, else the suspension with its final checkpoint."""
    outcome = _reported_end(run, observed, now)
    if outcome.intent is not None:
        return outcome
    return final_checkpoint.continue_suspension(run, current, observed, now)


def _continue_restart(
    run: RLRun, current: Intent, observed: ObservedRun, now: ClockReading
) -> RunTransition:
    """End a finished restart; a suspension, deadline or budget does not wait for one."""
    if _has_restarted(current, observed):
        return RunTransition(None)
    if run.spec.suspend:
        return RunTransition(_user_suspension(run, now))
    over = failure_policy.deadline_transition(
        run, observed, now
    ) or failure_policy.budget_transition(run, now)
    return over or RunTransition(current)


def _user_suspension(run: RLRun, now: ClockReading) -> Intent:
    return transitions.new_intent(run, "Suspend", Reason.BY_USER, "spec.suspend is true", now)


def _reported_end(run: RLRun, observed: ObservedRun, now: ClockReading) -> RunTransition:
    """The transition that the controller's report of the run's end calls for."""
    report = observed.report
    if not report.is_current or report.status is None or run.status.active.since is None:
        return RunTransition(None)
    if report.status.state == run_pb2.RUN_STATE_DONE:
        return _completion(run, observed, now)
    if report.status.state == run_pb2.RUN_STATE_FAILED:
        reason = report.status.reason or Reason.ROLE_FAILED
        message = report.status.message
        failure = Failure(
            time=rfc3339(now.wall_s), role=names.TRAINER, reason=reason[:64], message=message[:1024]
        )
        return RunTransition(transitions.new_intent(run, "Fail", reason, message, now), failure)
    if report.status.reason in holds.REPORTED_REASONS and run.status.intent is None:
        reason = Reason(report.status.reason)
        return transitions.transition(run, "Suspend", reason, report.status.message, now)
    return RunTransition(None)


def _completion(run: RLRun, observed: ObservedRun, now: ClockReading) -> RunTransition:
    """Complete the run once its final checkpoint was verified, or verification timed out.

    A checkpoint that the cluster refuses as an object is in the store all the same, and is
    registered once it can be: waiting for that must not hold GPUs.
    """
    is_late = limits.verification_left_s(run, observed, now) <= 0
    if not (observed.is_registered or is_late):
        return RunTransition(None)
    last = observed.last_saved_checkpoints
    corrupt = [c for c in last if is_corrupt(c)]
    # One that was saved again may still be read back beside the damaged one.
    if corrupt and observed.has_saved and not any(is_ready(c) for c in last):
        sentence = f"{corrupt[0].metadata.name} does not match its manifest; its steps are repeated"
        return RunTransition(
            transitions.restart_intent(run, names.TRAINER, Reason.CORRUPT, sentence, now)
        )
    if not (observed.has_saved or is_late):
        return RunTransition(None)
    report = observed.report.status
    if report is not None and report.reason == Reason.TARGET_REACHED:
        return transitions.transition(run, "Complete", report.reason, report.message, now)
    message = "every phase is done"
    return transitions.transition(run, "Complete", Reason.ALL_PHASES_DONE, message, now)


def _has_restarted(intent: Intent, observed: ObservedRun) -> bool:
    """Every pod of an earlier attempt of the role is terminating or gone."""
    return all(
        labels(pod).get(names.ATTEMPT) == str(intent.attempt) or is_deleting(pod)
        for pod in _pods_to_restart(intent, observed)
    ) and all(
        labels(m["spec"]["template"]).get(names.ATTEMPT) == str(intent.attempt)
        for m in observed.stateful_sets
        if not intent.role or labels(m).get(names.ROLE) == intent.role
    )


def _pods_to_restart(intent: Intent, observed: ObservedRun) -> list[Manifest]:
    roles = [intent.role] if intent.role else list(observed.pods)
    return [pod for role in roles for pod in observed.pods.get(role, ())]
