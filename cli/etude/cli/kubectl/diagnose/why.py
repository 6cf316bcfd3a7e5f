"""Diagnosis: a pure function from an observed run to the first cause of its standstill."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from etude.cli.kubectl import manifests
from etude.cli.kubectl.diagnose import pods
from etude.cli.kubectl.diagnose.advice import advice
from etude.cli.kubectl.diagnose.diagnosis import Explanation, State, in_short
from etude.cli.kubectl.diagnose.observed import HOUR_S, ROLE, TRAINER, Seen, pace
from etude.cli.kubectl.diagnose.pods import Finding
from etude.cli.kubectl.diagnose.workloads import crowded_finding, pool_finding, uncreated_finding
from etude.cli.kubectl.durations import ago, parsed, span
from etude.common.api.meta import Condition
from etude.common.api.run.lifecycle import FailurePolicy
from etude.common.api.run.status import RLRunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The observed run that each check looks at."""

    seen: Seen
    now: datetime
    status: RLRunStatus = field(init=False)
    conditions: dict[str, Condition] = field(init=False)

    def __post_init__(self) -> None:
        status = self.seen.status
        object.__setattr__(self, "status", status)
        object.__setattr__(self, "conditions", {each.type: each for each in status.conditions})

    def says(self, kind: str, status: str) -> Condition | None:
        """The condition of this type, if it has this status."""
        found = self.conditions.get(kind)
        return found if found is not None and found.status == status else None

    def because(self, state: State, condition: Condition, *more: str) -> Explanation:
        """The diagnosis with a condition as its cause."""
        told = in_short(condition.message)
        known = advice(condition.reason, condition.type)
        finding = Finding(condition.reason, known.means, (told,) if told else (), known.do)
        return self.found(state, finding, *more)

    def found(self, state: State, finding: Finding, *more: str) -> Explanation:
        """The diagnosis with a blocker as its cause."""
        return explanation(self.seen.name, state, finding, *more)


def explanation(run: str, state: State, finding: Finding, *more: str) -> Explanation:
    """The diagnosis of a run with a blocker as its cause."""
    known = advice(finding.reason)
    return Explanation(
        run=run,
        state=state,
        reason=finding.reason,
        cause=finding.cause,
        evidence=(*finding.evidence, *(line for line in more if line)),
        do=(finding.do or known.do).replace("{run}", run),
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


def explain(seen: Seen, now: datetime) -> Explanation:
    """Diagnose a run: the first cause that keeps it from progressing, if there is one.

    Raises:
        UserError: the status was written by an operator of another version.
    """
    left_alone = _left_alone(seen)
    if left_alone is not None:
        return left_alone
    case = Case(seen=seen, now=now)
    for question in QUESTIONS:
        answer = question(case)
        if answer is not None:
            return answer
    return _progressing(case)


def _left_alone(seen: Seen) -> Explanation | None:
    """The diagnosis for a status that neither the operator nor this command can read."""
    told = [
        each
        for each in manifests.events_about(seen.run, seen.events)
        if each["reason"] == "InvalidStatus"
    ]
    if not told or seen.is_readable:
        return None
    finding = _by_reason("InvalidStatus", told[-1].get("message", ""))
    return explanation(seen.name, State.STANDS_STILL, finding)


def _leaving(case: Case) -> Explanation | None:
    if not manifests.is_terminating(case.seen.run):
        return None
    for event in case.seen.events:
        if event.get("reason") == "DataOrphaned":
            return case.found(State.OVER, _by_reason("DataOrphaned", event.get("message", "")))
    for checkpoint in case.seen.checkpoints:
        ready = manifests.condition(checkpoint, "Ready")
        if manifests.is_terminating(checkpoint) and ready.get("reason") in {
            "Deleting",
            "DeletionFailed",
        }:
            words = f"{manifests.name(checkpoint)}: {ready.get('message', '')}"
            return case.found(State.STANDS_STILL, _by_reason(ready["reason"], words))
    left = ", ".join(manifests.name(pod) for pod in case.seen.pods)
    evidence = (f"still there: {left}",) if left else ()
    return case.found(State.OVER, Finding("Terminating", "it is being deleted", evidence))


def _by_reason(reason: str, words: str) -> Finding:
    return Finding(reason, advice(reason).means, (words,) if words else ())


def _ended(case: Case) -> Explanation | None:
    for kind, state in (("Failed", State.FAILED), ("Complete", State.OVER)):
        ended = case.says(kind, "True")
        if ended is not None:
            return case.because(state, ended, _last_failure(case))
    intent = case.status.intent
    if intent is None or intent.type != "Fail":
        return None
    # Decided, though its pods are still terminating.
    return case.found(State.FAILED, _by_reason(intent.reason, intent.message), _last_failure(case))


def _last_failure(case: Case) -> str:
    last = case.status.last_failure
    if last is None:
        return ""
    code = "" if last.exit_code is None else f", exit code {last.exit_code}"
    lines = last.message.strip().splitlines()
    words = f": {lines[-1].strip()}" if lines else ""
    return f"last failure, {ago(last.time, case.now)}: {last.pod or last.role}{code}{words}"


def _unobserved(case: Case) -> Explanation | None:
    """The diagnosis if the operator has not observed the present spec."""
    generation = case.seen.run["metadata"].get("generation", 0)
    looked = [each.observed_generation for each in case.status.conditions]
    observed = max([*looked, case.status.observed_generation])
    if looked and observed >= generation:
        return None
    said = "an older spec of the run" if looked else "nothing of the run"
    evidence = (f"observed generation {observed} of {generation}",)
    finding = Finding("OperatorSilent", f"the operator has seen {said}", evidence)
    return case.found(State.STANDS_STILL, finding)


def _resting(case: Case) -> Explanation | None:
    saved = case.says("CheckpointHealthy", "False")
    late = saved if saved is not None and saved.reason == "SuspendTimeout" else None
    intent = case.status.intent
    if intent is not None and intent.type in {"Suspend", "Release"}:
        suspending = case.conditions.get("Suspended")
        shown = late or suspending
        if shown is not None:
            began = f"it began {ago(intent.since, case.now)}"
            return case.because(State.WAITS, shown, began, *_unverified(case))
    suspended = case.says("Suspended", "True")
    if suspended is None:
        return None
    newest = case.status.last_checkpoint
    at = "" if newest is None else f"it goes on after {newest.name}, step {newest.step}"
    return case.because(State.RESTS, late or suspended, at)


def _unverified(case: Case) -> Iterator[str]:
    """The checkpoint that a suspension waits for, in words."""
    for newest in case.seen.checkpoints[:1]:
        phase = (newest.get("status") or {}).get("phase", "")
        if phase != "Ready":
            yield f"{manifests.name(newest)} is {phase or 'not looked at yet'}"


def _refused(case: Case) -> Explanation | None:
    refused = case.says("Accepted", "False")
    if refused is None:
        return None
    is_again = refused.reason == "ClusterUnavailable"
    return case.because(State.WAITS if is_again else State.STANDS_STILL, refused)


def _queued(case: Case) -> Explanation | None:
    """The diagnosis for a run without quota, which has no pods yet."""
    queued = case.says("QuotaReserved", "False")
    return None if queued is None else case.because(State.WAITS, queued)


def _blocked(case: Case) -> Explanation | None:
    """The diagnosis from blockers of pods and pools; those that pass without help come last."""
    if case.says("Progressing", "True"):
        return None
    found = sorted(_findings(case), key=lambda each: each.reason in PASSING)
    if not found:
        return None
    first, *others = found
    state = State.WAITS if first.reason in PASSING | {"WaitingForQuota"} else State.STANDS_STILL
    beside = (f"beside it, {each.cause}" for each in others)
    return case.found(state, first, *beside, *_outgoing(case))


def _findings(case: Case) -> Iterator[Finding]:
    """The blockers of the pods that the active phase needs, then of its pools."""
    samples = case.seen.samples_now
    needed = [
        pod for pod in case.seen.pods_of() if samples or manifests.labels(pod).get(ROLE) == TRAINER
    ]
    unready = [pod for pod in needed if not pods.is_ready(pod)]
    pool = pool_finding(case.seen) if samples else None
    uncreated = uncreated_finding(case.seen)
    pod = pods.first_finding(unready, case.seen.events)
    failed = _failed_before(case)
    if failed is not None and pod is not None and pod.reason == "PodsNotReady":
        pod = None  # it starts because it failed
    found = (uncreated, pod, failed, pool)
    return (each for each in found if each is not None)


def _failed_before(case: Case) -> Finding | None:
    """The blocker of a role that failed and is restarted, perhaps repeatedly."""
    last = case.status.last_failure
    degraded = case.says("Degraded", "True")
    if last is None or degraded is None or degraded.reason != "RoleFailed":
        return None
    policy = case.seen.run["spec"].get("failurePolicy") or {}
    count, limit = case.status.restarts.counted, policy.get("maxRestarts", MAX_RESTARTS)
    times = f", restart {count} of {limit}"
    end = pods.End(last.pod or last.role, last.exit_code, last.message, times)
    found = end.finding("RoleFailed", is_out_of_memory=last.reason == "OOMKilled")
    return found._replace(evidence=(*found.evidence, f"it ended {ago(last.time, case.now)}"))


def _roles_unready(case: Case) -> Explanation | None:
    """The diagnosis from the operator's conditions if no pod says more."""
    if case.says("Progressing", "True"):
        return None
    for kind in ("PodsScheduled", "RolesReady", "EnvironmentsReady"):
        found = case.says(kind, "False")
        if found is not None:
            state = State.WAITS if found.reason in PASSING else State.STANDS_STILL
            return case.because(state, found, _last_failure(case), *_outgoing(case))
    return None


def _outgoing(case: Case) -> Iterator[str]:
    """Terminating pods, which block their successors, in words."""
    for pod in case.seen.pods_of():
        if manifests.is_terminating(pod):
            left_s = (parsed(pod["metadata"]["deletionTimestamp"]) - case.now).total_seconds()
            yield f"{manifests.name(pod)} is terminating, which may take {span(left_s)}"


def _stalled(case: Case) -> Explanation | None:
    stalled = case.says("Stalled", "True")
    return None if stalled is None else case.because(State.STANDS_STILL, stalled, _since(case))


def _unready_controller(case: Case) -> Explanation | None:
    waiting = case.says("Progressing", "False") or case.says("Ready", "False")
    if waiting is None:
        return None
    is_loading = waiting.reason == "Loading"
    return case.because(State.WAITS if is_loading else State.STANDS_STILL, waiting, _since(case))


def _degraded(case: Case) -> Explanation | None:
    for kind, status in (("Degraded", "True"), ("CheckpointHealthy", "False")):
        found = case.says(kind, status)
        if found is not None:
            state = State.STANDS_STILL if _is_silent(case) else State.PROGRESSES
            return case.because(state, found, _since(case))
    return None


def _silent(case: Case) -> Explanation | None:
    if not _is_silent(case):
        return None
    crowded = crowded_finding(case.seen)
    if crowded is not None:
        return case.found(State.WAITS, crowded, _since(case))
    finding = Finding("SilentStep", advice("SilentStep").means)
    return case.found(State.WAITS, finding, _since(case))


def _is_silent(case: Case) -> bool:
    """True if no step finished for long, although the run has had pods for as long."""
    times = [each for each in (case.status.last_step_time, case.status.active.since) if each]
    if not times or case.status.phase in BUSY:
        return False
    steps_per_hour = pace(case.seen.checkpoints)
    usual_s = HOUR_S / steps_per_hour if steps_per_hour else 0.0
    limit_s = max(SILENT_S, USUAL_STEPS * usual_s)
    return (case.now - max(map(parsed, times))).total_seconds() > limit_s


def _since(case: Case) -> str:
    last = case.status.last_step_time
    step = case.status.step
    if last is None:
        return ""
    return f"the last step{f', {step.text},' if step else ''} finished {ago(last, case.now)}"


def _progressing(case: Case) -> Explanation:
    found = case.conditions.get("Progressing")
    reason = found.reason if found is not None else "StepsFinish"
    crowded = crowded_finding(case.seen)
    beside = [*_findings(case), *([] if crowded is None else [crowded])]
    words = [f"beside it, {each.cause}" for each in beside]
    return case.found(State.PROGRESSES, _by_reason(reason, _since(case)), *words)


QUESTIONS: tuple[Callable[[Case], Explanation | None], ...] = (
    _leaving,
    _ended,
    _unobserved,
    _resting,
    _refused,
    _queued,
    _blocked,
    _roles_unready,
    _stalled,
    _unready_controller,
    _degraded,
    _silent,
)
"""The checks in causal order; the first that answers gives the cause."""


def now() -> datetime:
    """The present time in UTC."""
    return datetime.now(UTC)
