"""Diagnosis: a pure function from an observed run to the first cause of its standstill."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from etude.cli.kubectl import manifests
from etude.cli.kubectl.diagnose import pods
from etude.cli.kubectl.diagnose.advice import advice
from etude.cli.kubectl.diagnose.diagnosis import Diagnosis, RunState, last_line
from etude.cli.kubectl.diagnose.pods import Blocker
from etude.cli.kubectl.diagnose.run_objects import HOUR_S, ROLE, TRAINER, RunObjects, steps_per_hour
from etude.cli.kubectl.diagnose.workloads import full_pool_blocker, pool_blocker, workload_blocker
from etude.cli.kubectl.durations import format_ago, format_duration, parse_time
from etude.common.api.meta import Condition
from etude.common.api.run.lifecycle import FailurePolicy
from etude.common.api.run.status import RLRunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisContext:
    """The observed run that each check looks at."""

    seen: RunObjects
    now: datetime
    status: RLRunStatus = field(init=False)
    conditions: dict[str, Condition] = field(init=False)

    def __post_init__(self) -> None:
        status = self.seen.status
        object.__setattr__(self, "status", status)
        object.__setattr__(self, "conditions", {each.type: each for each in status.conditions})

    def find_condition(self, kind: str, status: str) -> Condition | None:
        """The condition of this type, if it has this status."""
        found = self.conditions.get(kind)
        return found if found is not None and found.status == status else None

    def from_condition(self, state: RunState, condition: Condition, *more: str) -> Diagnosis:
        """The diagnosis with a condition as its cause."""
        told = last_line(condition.message)
        known = advice(condition.reason, condition.type)
        blocker = Blocker(condition.reason, known.means, (told,) if told else (), known.do)
        return self.from_blocker(state, blocker, *more)

    def from_blocker(self, state: RunState, blocker: Blocker, *more: str) -> Diagnosis:
        """The diagnosis with a blocker as its cause."""
        return make_diagnosis(self.seen.name, state, blocker, *more)


def make_diagnosis(run: str, state: RunState, blocker: Blocker, *more: str) -> Diagnosis:
    """The diagnosis of a run with a blocker as its cause."""
    known = advice(blocker.reason)
    return Diagnosis(
        name=run,
        state=state,
        reason=blocker.reason,
        cause=blocker.cause,
        evidence=(*blocker.evidence, *(line for line in more if line)),
        do=(blocker.do or known.do).replace("{run}", run),
        runbook=known.runbook,
    )


SILENT_S = 300.0
"""Silence that is never reported; longer where steps are long."""
USUAL_STEPS = 3
"""Multiple of the usual step time below which silence is not reported."""
MAX_RESTARTS = FailurePolicy().max_restarts
"""Default of a spec without failurePolicy: the API server fills it in."""
PASSING = {"PodsNotReady", "PoolWarming", "BrokerNotReady"}
"""Reasons that usually pass without help."""
BUSY = {"Checkpointing", "Evaluating"}
"""Phases in which no step is expected."""


def diagnose(seen: RunObjects, now: datetime) -> Diagnosis:
    """Diagnose a run: the first cause that keeps it from progressing, if there is one.

    Raises:
        UserError: the status was written by an operator of another version.
    """
    left_alone = _check_unreadable(seen)
    if left_alone is not None:
        return left_alone
    context = DiagnosisContext(seen=seen, now=now)
    for question in CHECKS:
        answer = question(context)
        if answer is not None:
            return answer
    return _diagnose_progress(context)


def _check_unreadable(seen: RunObjects) -> Diagnosis | None:
    """The diagnosis for a status that neither the operator nor this command can read."""
    told = [
        each
        for each in manifests.events_about(seen.run, seen.events)
        if each["reason"] == "InvalidStatus"
    ]
    if not told or seen.is_readable:
        return None
    blocker = _reason_blocker("InvalidStatus", told[-1].get("message", ""))
    return make_diagnosis(seen.name, RunState.STANDS_STILL, blocker)


def _check_deleted(context: DiagnosisContext) -> Diagnosis | None:
    if not manifests.is_terminating(context.seen.run):
        return None
    for event in context.seen.events:
        if event.get("reason") == "DataOrphaned":
            return context.from_blocker(
                RunState.OVER, _reason_blocker("DataOrphaned", event.get("message", ""))
            )
    for checkpoint in context.seen.checkpoints:
        ready = manifests.condition_of(checkpoint, "Ready")
        if manifests.is_terminating(checkpoint) and ready.get("reason") in {
            "Deleting",
            "DeletionFailed",
        }:
            words = f"{manifests.name_of(checkpoint)}: {ready.get('message', '')}"
            return context.from_blocker(
                RunState.STANDS_STILL, _reason_blocker(ready["reason"], words)
            )
    left = ", ".join(manifests.name_of(pod) for pod in context.seen.pods)
    evidence = (f"still there: {left}",) if left else ()
    return context.from_blocker(
        RunState.OVER, Blocker("Terminating", "it is being deleted", evidence)
    )


def _reason_blocker(reason: str, words: str) -> Blocker:
    return Blocker(reason, advice(reason).means, (words,) if words else ())


def _check_ended(context: DiagnosisContext) -> Diagnosis | None:
    for kind, state in (("Failed", RunState.FAILED), ("Complete", RunState.OVER)):
        ended = context.find_condition(kind, "True")
        if ended is not None:
            return context.from_condition(state, ended, _last_failure(context))
    intent = context.status.intent
    if intent is None or intent.type != "Fail":
        return None
    # Decided, though its pods are still terminating.
    return context.from_blocker(
        RunState.FAILED, _reason_blocker(intent.reason, intent.message), _last_failure(context)
    )


def _last_failure(context: DiagnosisContext) -> str:
    last = context.status.last_failure
    if last is None:
        return ""
    code = "" if last.exit_code is None else f", exit code {last.exit_code}"
    lines = last.message.strip().splitlines()
    words = f": {lines[-1].strip()}" if lines else ""
    return (
        f"last failure, {format_ago(last.time, context.now)}: {last.pod or last.role}{code}{words}"
    )


def _check_unobserved(context: DiagnosisContext) -> Diagnosis | None:
    """The diagnosis if the operator has not observed the present spec."""
    generation = context.seen.run["metadata"].get("generation", 0)
    looked = [each.observed_generation for each in context.status.conditions]
    observed = max([*looked, context.status.observed_generation])
    if looked and observed >= generation:
        return None
    said = "an older spec of the run" if looked else "nothing of the run"
    evidence = (f"observed generation {observed} of {generation}",)
    blocker = Blocker("OperatorSilent", f"the operator has seen {said}", evidence)
    return context.from_blocker(RunState.STANDS_STILL, blocker)


def _check_suspended(context: DiagnosisContext) -> Diagnosis | None:
    saved = context.find_condition("CheckpointHealthy", "False")
    late = saved if saved is not None and saved.reason == "SuspendTimeout" else None
    intent = context.status.intent
    if intent is not None and intent.type in {"Suspend", "Release"}:
        suspending = context.conditions.get("Suspended")
        shown = late or suspending
        if shown is not None:
            began = f"it began {format_ago(intent.since, context.now)}"
            return context.from_condition(
                RunState.WAITS, shown, began, *_unverified_checkpoint(context)
            )
    suspended = context.find_condition("Suspended", "True")
    if suspended is None:
        return None
    newest = context.status.last_checkpoint
    at = "" if newest is None else f"it goes on after {newest.name}, step {newest.step}"
    return context.from_condition(RunState.RESTS, late or suspended, at)


def _unverified_checkpoint(context: DiagnosisContext) -> Iterator[str]:
    """The checkpoint that a suspension waits for, in words."""
    for newest in context.seen.checkpoints[:1]:
        phase = (newest.get("status") or {}).get("phase", "")
        if phase != "Ready":
            yield f"{manifests.name_of(newest)} is {phase or 'not looked at yet'}"


def _check_refused(context: DiagnosisContext) -> Diagnosis | None:
    refused = context.find_condition("Accepted", "False")
    if refused is None:
        return None
    is_again = refused.reason == "ClusterUnavailable"
    return context.from_condition(RunState.WAITS if is_again else RunState.STANDS_STILL, refused)


def _check_queued(context: DiagnosisContext) -> Diagnosis | None:
    """The diagnosis for a run without quota, which has no pods yet."""
    queued = context.find_condition("QuotaReserved", "False")
    return None if queued is None else context.from_condition(RunState.WAITS, queued)


def _check_blocked(context: DiagnosisContext) -> Diagnosis | None:
    """The diagnosis from blockers of pods and pools; those that pass without help come last."""
    if context.find_condition("Progressing", "True"):
        return None
    blockers = sorted(_find_blockers(context), key=lambda each: each.reason in PASSING)
    if not blockers:
        return None
    first, *others = blockers
    state = (
        RunState.WAITS if first.reason in PASSING | {"WaitingForQuota"} else RunState.STANDS_STILL
    )
    evidence = (f"also, {each.cause}" for each in others)
    return context.from_blocker(state, first, *evidence, *_terminating_pods(context))


def _find_blockers(context: DiagnosisContext) -> Iterator[Blocker]:
    """The blockers of the pods that the active phase needs, then of its pools."""
    samples = context.seen.samples_now
    needed = [
        pod
        for pod in context.seen.pods_of()
        if samples or manifests.labels_of(pod).get(ROLE) == TRAINER
    ]
    unready = [pod for pod in needed if not pods.is_ready(pod)]
    pool = pool_blocker(context.seen) if samples else None
    uncreated = workload_blocker(context.seen.sets, context.seen.events)
    pod = pods.first_blocker(unready, context.seen.events)
    failed = _failed_role_blocker(context)
    if failed is not None and pod is not None and pod.reason == "PodsNotReady":
        pod = None  # it starts because it failed
    found = (uncreated, pod, failed, pool)
    return (each for each in found if each is not None)


def _failed_role_blocker(context: DiagnosisContext) -> Blocker | None:
    """The blocker of a role that failed and is restarted, perhaps repeatedly."""
    last = context.status.last_failure
    degraded = context.find_condition("Degraded", "True")
    if last is None or degraded is None or degraded.reason != "RoleFailed":
        return None
    policy = context.seen.run["spec"].get("failurePolicy") or {}
    count, limit = context.status.restarts.counted, policy.get("maxRestarts", MAX_RESTARTS)
    times = f", restart {count} of {limit}"
    end = pods.ContainerEnd(last.pod or last.role, last.exit_code, last.message, times)
    found = end.blocker("RoleFailed", is_out_of_memory=last.reason == "OOMKilled")
    return found._replace(
        evidence=(*found.evidence, f"it ended {format_ago(last.time, context.now)}")
    )


def _check_roles(context: DiagnosisContext) -> Diagnosis | None:
    """The diagnosis from the operator's conditions if no pod says more."""
    if context.find_condition("Progressing", "True"):
        return None
    for kind in ("PodsScheduled", "RolesReady", "EnvironmentsReady"):
        found = context.find_condition(kind, "False")
        if found is not None:
            state = RunState.WAITS if found.reason in PASSING else RunState.STANDS_STILL
            return context.from_condition(
                state, found, _last_failure(context), *_terminating_pods(context)
            )
    return None


def _terminating_pods(context: DiagnosisContext) -> Iterator[str]:
    """Terminating pods, which block their successors, in words."""
    for pod in context.seen.pods_of():
        if manifests.is_terminating(pod):
            left_s = (
                parse_time(pod["metadata"]["deletionTimestamp"]) - context.now
            ).total_seconds()
            left = format_duration(left_s)
            yield f"{manifests.name_of(pod)} is terminating, which may take {left}"


def _check_stalled(context: DiagnosisContext) -> Diagnosis | None:
    stalled = context.find_condition("Stalled", "True")
    return (
        None
        if stalled is None
        else context.from_condition(RunState.STANDS_STILL, stalled, _last_step(context))
    )


def _check_controller(context: DiagnosisContext) -> Diagnosis | None:
    waiting = context.find_condition("Progressing", "False") or context.find_condition(
        "Ready", "False"
    )
    if waiting is None:
        return None
    is_passing = waiting.reason in {"Loading", "WaitingForWindow"}
    return context.from_condition(
        RunState.WAITS if is_passing else RunState.STANDS_STILL, waiting, _last_step(context)
    )


def _check_degraded(context: DiagnosisContext) -> Diagnosis | None:
    for kind, status in (("Degraded", "True"), ("CheckpointHealthy", "False")):
        found = context.find_condition(kind, status)
        if found is not None:
            state = RunState.STANDS_STILL if _is_silent(context) else RunState.PROGRESSES
            return context.from_condition(state, found, _last_step(context))
    return None


def _check_silent(context: DiagnosisContext) -> Diagnosis | None:
    if not _is_silent(context):
        return None
    crowded = full_pool_blocker(context.seen)
    if crowded is not None:
        return context.from_blocker(RunState.WAITS, crowded, _last_step(context))
    blocker = Blocker("SilentStep", advice("SilentStep").means)
    return context.from_blocker(RunState.WAITS, blocker, _last_step(context))


def _is_silent(context: DiagnosisContext) -> bool:
    """True if no step finished for long, although the run has had pods for as long."""
    times = [each for each in (context.status.last_step_time, context.status.active.since) if each]
    if not times or context.status.phase in BUSY:
        return False
    rate = steps_per_hour(context.seen.checkpoints)
    usual_s = HOUR_S / rate if rate else 0.0
    limit_s = max(SILENT_S, USUAL_STEPS * usual_s)
    return (context.now - max(map(parse_time, times))).total_seconds() > limit_s


def _last_step(context: DiagnosisContext) -> str:
    last = context.status.last_step_time
    step = context.status.step
    if last is None:
        return ""
    return (
        f"the last step{f', {step.text},' if step else ''} finished {format_ago(last, context.now)}"
    )


def _diagnose_progress(context: DiagnosisContext) -> Diagnosis:
    found = context.conditions.get("Progressing")
    reason = found.reason if found is not None else "StepsFinish"
    crowded = full_pool_blocker(context.seen)
    others = [*_find_blockers(context), *([] if crowded is None else [crowded])]
    words = [f"also, {each.cause}" for each in others]
    return context.from_blocker(
        RunState.PROGRESSES, _reason_blocker(reason, _last_step(context)), *words
    )


CHECKS: tuple[Callable[[DiagnosisContext], Diagnosis | None], ...] = (
    _check_deleted,
    _check_ended,
    _check_unobserved,
    _check_suspended,
    _check_refused,
    _check_queued,
    _check_blocked,
    _check_roles,
    _check_stalled,
    _check_controller,
    _check_degraded,
    _check_silent,
)
"""The checks in causal order; the first that answers gives the cause."""


def utc_now() -> datetime:
    """The present time in UTC."""
    return datetime.now(UTC)
