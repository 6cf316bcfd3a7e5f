"""What to undertake next: decided once, written down, then carried out."""

from collections.abc import Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.status import Failure, Intent
from etude.operator import desired, failures, limits, names
from etude.operator.actions import Moment
from etude.operator.clock import rfc3339, seconds
from etude.operator.failures import PodFailure, Verdict
from etude.operator.manifests import is_deleting, labels
from etude.operator.reasons import Reason
from etude.operator.seen import Seen, is_corrupt, is_ready
from etude.v1 import run_pb2

SILENCE_LIMIT_S = 30.0
"""A controller whose pod is Ready answers within this, or is treated as gone."""


class Undertaking(NamedTuple):
    """An intent, and the failure that led to it."""

    intent: Intent | None
    failure: Failure | None = None


def undertaking(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    """The present intent until it is carried out, then the next one that is called for."""
    current = run.status.intent
    if current is None:
        return _next(run, seen, now)
    match current.type:
        case "Suspend":
            return _suspending(run, current, seen, now)
        case "Release":
            return Undertaking(None if seen.is_gone else current)
        case "Restart":
            return Undertaking(None if _has_restarted(current, seen) else current)
        case "Fail" | "Complete":
            return Undertaking(current)


def attempts_of(run: RLRun) -> Mapping[str, int]:
    """The attempt that each role is at."""
    return {role.name: role.attempt for role in run.status.roles}


def _next(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    outcome = _outcome(run, seen, now)
    if outcome.intent is not None:
        return outcome
    if run.spec.suspend:
        held = not seen.is_gone
        message = "spec.suspend is true"
        return Undertaking(_intent(run, "Suspend", Reason.BY_USER, message, now) if held else None)
    return _after_failure(run, seen, now) or _after_deadline(run, seen, now) or Undertaking(None)


def _outcome(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    """What the controller says about the end of the run, if it says so now."""
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
        return Undertaking(_intent(run, "Fail", reason, message, now), failure)
    return Undertaking(None)


def _done(run: RLRun, seen: Seen, now: Moment) -> Undertaking:
    """The end, once the final checkpoint was read back, or for too long could not be."""
    if not _is_registered(seen):
        return Undertaking(None)
    last = seen.last_saved
    corrupt = [c for c in last if is_corrupt(c)]
    # One that was saved again may still be read back beside the damaged one.
    if corrupt and seen.has_saved and not any(is_ready(c) for c in last):
        sentence = f"{corrupt[0].metadata.name} does not match its manifest; its steps are repeated"
        return Undertaking(_restart(run, names.TRAINER, Reason.CORRUPT, sentence, now))
    if not seen.has_saved and limits.verification_left_s(run, seen, now) > 0:
        return Undertaking(None)
    message = "every phase is done"
    return Undertaking(_intent(run, "Complete", Reason.ALL_PHASES_DONE, message, now))


def _is_registered(seen: Seen) -> bool:
    """Whether every checkpoint that was told of is an object."""
    return all(h.checkpoint is None for h in seen.report.happenings)


def _after_failure(run: RLRun, seen: Seen, now: Moment) -> Undertaking | None:
    attempts = attempts_of(run)
    found = [
        failure
        for role in desired.roles(run)
        for failure in failures.failures(
            role, failures.of_attempt(seen.pods.get(role, ()), attempts.get(role, 0))
        )
    ]
    failure = failures.worst(found)
    if failure is None:
        return None
    noted = _noted(failure, now)
    if failures.verdict(failure) == Verdict.FAIL:
        message = f"{failure.pod} refused to start: {failure.message}"
        return Undertaking(_intent(run, "Fail", Reason.INVALID_SPEC, message, now), noted)
    sentence = f"{failure.pod} ended with exit code {failure.exit_code}"
    return Undertaking(_restart(run, failure.role, Reason.ROLE_FAILED, sentence, now), noted)


def _after_deadline(run: RLRun, seen: Seen, now: Moment) -> Undertaking | None:
    report = seen.report
    if any(left <= 0 for left in limits.deadlines_left_s(run, seen, now)):
        given = run.spec.deadlines.model_dump(by_alias=True, exclude_none=True)
        words = ", ".join(f"{name} {value}" for name, value in given.items())
        message = f"the run has held pods for {limits.active_s(run, now.wall_s):.0f} s: {words}"
        return Undertaking(_intent(run, "Fail", Reason.DEADLINE_EXCEEDED, message, now))
    left = limits.progress_left_s(run, seen, now)
    if left is not None and left <= 0 and report.status is not None:
        message = f"nothing was finished for {limits.progress_limit_s(run, report.status):.0f} s"
        return Undertaking(_restart(run, names.TRAINER, Reason.NO_PROGRESS, message, now))
    return None


def _restart(run: RLRun, role: str, reason: str, message: str, now: Moment) -> Intent:
    """Start a role anew, unless that was done too often."""
    if run.status.restarts.counted >= run.spec.failure_policy.max_restarts:
        limit = run.spec.failure_policy.max_restarts
        message = f"{message}; {limit} restarts were allowed"
        return _intent(run, "Fail", Reason.RESTARTS_EXHAUSTED, message, now)
    intent = _intent(run, "Restart", reason, message, now)
    return intent.model_copy(update={"role": role, "attempt": run.status.attempt + 1})


def _suspending(run: RLRun, current: Intent, seen: Seen, now: Moment) -> Undertaking:
    """Wait for the checkpoint, then let the pods go; from there on there is no way back."""
    outcome = _outcome(run, seen, now)
    if outcome.intent is not None:
        return outcome
    limit_s = run.spec.checkpointing.timeout_seconds
    if now.wall_s - seconds(current.since) > limit_s:
        message = f"no verified checkpoint within {limit_s} s; the last one is used"
        return Undertaking(_intent(run, "Release", Reason.SUSPEND_TIMEOUT, message, now))
    if _has_saved(run, seen, now):
        return Undertaking(_intent(run, "Release", current.reason, current.message, now))
    return Undertaking(current)


def _has_saved(run: RLRun, seen: Seen, now: Moment) -> bool:
    """Whether a run that shall be suspended has saved all that it can."""
    if run.spec.checkpointing.on_suspend == "Skip":
        return True
    if not seen.ready(names.TRAINER, attempt=attempts_of(run).get(names.TRAINER, 0)):
        return True  # nothing that could still be saved
    report = seen.report
    if not report.is_connected:
        return _silence_s(run, seen, now) > SILENCE_LIMIT_S
    is_over = report.status is not None and report.status.state in limits.OVER
    return is_over and _is_registered(seen) and seen.has_saved


def _has_restarted(intent: Intent, seen: Seen) -> bool:
    """Whether no pod of an earlier attempt of the role is left to be told to go."""
    return all(
        labels(pod).get(names.ATTEMPT) == str(intent.attempt) or is_deleting(pod)
        for pod in seen.pods.get(intent.role, ())
    ) and all(
        labels(m["spec"]["template"]).get(names.ATTEMPT) == str(intent.attempt)
        for m in seen.sets
        if labels(m).get(names.ROLE) == intent.role
    )


def _silence_s(run: RLRun, seen: Seen, now: Moment) -> float:
    """How long the controller has said nothing, since the suspension began at the latest."""
    intent = run.status.intent
    since_intent = now.wall_s - seconds(intent.since) if intent else 0.0
    silent = seen.report.silent_since_s
    return 0.0 if silent is None else min(since_intent, now.monotonic_s - silent)


def _intent(run: RLRun, kind: str, reason: str, message: str, now: Moment) -> Intent:
    return Intent.model_validate(
        {
            "type": kind,
            "reason": str(reason)[:64],
            "message": message[:1024],
            "generation": run.metadata.generation,
            "attempt": run.status.attempt,
            "since": rfc3339(now.wall_s),
        }
    )


def _noted(failure: PodFailure, now: Moment) -> Failure:
    return Failure(
        time=rfc3339(now.wall_s),
        role=failure.role,
        pod=failure.pod,
        reason=failure.reason[:64],
        exit_code=failure.exit_code,
        message=failure.message[-1024:],
    )
