"""Intents of a run: state transitions that are decided once, recorded, then carried out."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.status import Failure, Intent
from etude.operator import names
from etude.operator.actions import Moment
from etude.operator.checkpoints.status import is_corrupt, is_ready
from etude.operator.clock import rfc3339, seconds
from etude.operator.manifests import Manifest, is_deleting, labels
from etude.operator.reasons import Reason
from etude.operator.runs.capacity import kueue
from etude.operator.runs.lifecycle import failure_policy, final_checkpoint, limits, transitions
from etude.operator.runs.lifecycle.transitions import Undertaking
from etude.operator.runs.observe import Seen
from etude.v1 import run_pb2


def undertaking(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    """The present intent until it is carried out, then the next one."""
    current = run.status.intent
    if current is None:
        return final_checkpoint.begun(run, seen, _next(run, seen, now), now)
    match current.type:
        case "Suspend":
            return _suspending(run, current, seen, now)
        case "Release":
            return Undertaking(None if seen.is_gone else current)
        case "Restart":
            return _restarting(run, current, seen, now)
        case "Salvage":
            return final_checkpoint.ended(run, current, seen, now)
        case "Fail" | "Complete":
            return Undertaking(current)


def _next(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    outcome = _outcome(run, seen, now)
    if outcome.intent is not None:
        return outcome
    if run.spec.suspend:
        return Undertaking(None if seen.is_gone else _by_user(run, now))
    hold = run.status.hold
    if hold is not None:
        again = transitions.intent(run, "Suspend", hold.reason, hold.message, now)
        return Undertaking(None if seen.is_gone else again)
    said = kueue.quota(run, seen)
    if said.is_being_left:
        evicted = transitions.intent(run, "Suspend", Reason.EVICTED, said.message, now)
        return Undertaking(evicted)
    return (
        failure_policy.after_failure(run, seen, now)
        or failure_policy.after_deadline(run, seen, now)
        or failure_policy.after_stall(run, seen, now)
        or failure_policy.after_budget(run, now)
        or Undertaking(None)
    )


def _restarting(run: RLRun, current: Intent, seen: Seen, now: Moment) -> Undertaking:
    """End a finished restart; a suspension, deadline or budget does not wait for one."""
    if _has_restarted(current, seen):
        return Undertaking(None)
    if run.spec.suspend:
        return Undertaking(_by_user(run, now))
    over = failure_policy.after_deadline(run, seen, now) or failure_policy.after_budget(run, now)
    return over or Undertaking(current)


def _by_user(run: RLRun, now: Moment) -> Intent:
    return transitions.intent(run, "Suspend", Reason.BY_USER, "spec.suspend is true", now)


def _outcome(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    """The transition that the controller's report of the run's end calls for."""
    report = seen.report
    if not report.is_current or report.status is None or run.status.active.since is None:
        return Undertaking(None)
    if report.status.state == run_pb2.RUN_STATE_DONE:
        return _done(run, seen, now)
    if report.status.state == run_pb2.RUN_STATE_FAILED:
        reason = report.status.reason or Reason.ROLE_FAILED
        message = report.status.message
        failure = Failure(
            time=rfc3339(now.wall_s), role=names.TRAINER, reason=reason[:64], message=message[:1024]
        )
        return Undertaking(transitions.intent(run, "Fail", reason, message, now), failure)
    if report.status.reason == Reason.GATE_NOT_MET and run.status.intent is None:
        held = transitions.intent(run, "Suspend", Reason.GATE_NOT_MET, report.status.message, now)
        return Undertaking(held)
    return Undertaking(None)


def _done(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    """Complete the run once its final checkpoint was verified, or verification timed out.

    A checkpoint that the cluster refuses as an object is in the store all the same, and is
    registered once it can be: waiting for that must not hold GPUs.
    """
    is_late = limits.verification_left_s(run, seen, now) <= 0
    if not (seen.is_registered or is_late):
        return Undertaking(None)
    last = seen.last_saved
    corrupt = [c for c in last if is_corrupt(c)]
    # One that was saved again may still be read back beside the damaged one.
    if corrupt and seen.has_saved and not any(is_ready(c) for c in last):
        sentence = f"{corrupt[0].metadata.name} does not match its manifest; its steps are repeated"
        return Undertaking(transitions.restart(run, names.TRAINER, Reason.CORRUPT, sentence, now))
    if not (seen.has_saved or is_late):
        return Undertaking(None)
    said = seen.report.status
    if said is not None and said.reason == Reason.TARGET_REACHED:
        return Undertaking(transitions.intent(run, "Complete", said.reason, said.message, now))
    message = "every phase is done"
    return Undertaking(transitions.intent(run, "Complete", Reason.ALL_PHASES_DONE, message, now))


def _suspending(run: RLRun, current: Intent, seen: Seen, now: Moment) -> Undertaking:
    """Wait for the checkpoint, then release the pods; a release is never cancelled."""
    outcome = _outcome(run, seen, now)
    if outcome.intent is not None:
        return outcome
    limit_s = run.spec.checkpointing.timeout_seconds
    if now.wall_s - seconds(current.since) > limit_s:
        message = f"no verified checkpoint within {limit_s} s; the last one is used"
        return Undertaking(transitions.intent(run, "Release", Reason.SUSPEND_TIMEOUT, message, now))
    if _has_saved(run, seen, now):
        return Undertaking(transitions.intent(run, "Release", current.reason, current.message, now))
    return Undertaking(current)


def _has_saved(run: RLRun, seen: Seen, now: Moment) -> bool:
    """A run that is being suspended has saved all that it can."""
    if run.spec.checkpointing.on_suspend == "Skip":
        return True
    if not seen.ready(names.TRAINER, attempt=transitions.attempts_of(run).get(names.TRAINER, 0)):
        return True  # nothing that could still be saved
    report = seen.report
    if not report.is_connected:
        return _silence_s(run, seen, now) > limits.SILENCE_LIMIT_S
    is_over = report.status is not None and report.status.state in limits.OVER
    return is_over and seen.is_registered and seen.has_saved


def _has_restarted(intent: Intent, seen: Seen) -> bool:
    """Every pod of an earlier attempt of the role is terminating or gone."""
    return all(
        labels(pod).get(names.ATTEMPT) == str(intent.attempt) or is_deleting(pod)
        for pod in restarting(intent, seen)
    ) and all(
        labels(m["spec"]["template"]).get(names.ATTEMPT) == str(intent.attempt)
        for m in seen.sets
        if not intent.role or labels(m).get(names.ROLE) == intent.role
    )


def restarting(intent: Intent, seen: Seen) -> list[Manifest]:
    """Pods of the roles that restart, of this attempt and of earlier ones."""
    roles = [intent.role] if intent.role else list(seen.pods)
    return [pod for role in roles for pod in seen.pods.get(role, ())]


def _silence_s(run: RLRun, seen: Seen, now: Moment) -> float:
    """Seconds since the controller's last report, counted from the suspension at the earliest."""
    intent = run.status.intent
    since_intent = now.wall_s - seconds(intent.since) if intent else 0.0
    silent = seen.report.silent_since_s
    return 0.0 if silent is None else min(since_intent, now.monotonic_s - silent)
