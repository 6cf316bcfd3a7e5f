"""Why a run does not progress: a pure function from what is seen to the first cause."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from etude.cli.kubectl import pods
from etude.cli.kubectl.advice import advice
from etude.cli.kubectl.explanation import Explanation, State
from etude.cli.kubectl.pods import Finding
from etude.cli.kubectl.seen import ROLE, TRAINER, Seen
from etude.cli.kubectl.spans import ago, parsed
from etude.cli.kubectl.why_children import crowded_finding, pool_finding, uncreated_finding
from etude.common.api.meta import Condition
from etude.common.api.run import FailurePolicy
from etude.common.api.status import RLRunStatus

SILENT_S = 300.0
"""A step may take as long before anybody is told: the operator's own deadline is never shorter."""
MAX_RESTARTS = FailurePolicy().max_restarts
"""For a spec that says nothing of it: the API server fills it in."""
PASSING = {"PodsNotReady", "PoolWarming", "BrokerNotReady"}
"""What usually passes by itself."""
BUSY = {"Checkpointing", "Evaluating"}
"""Phases in which no step is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What one question after the other is asked about."""

    seen: Seen
    now: datetime
    status: RLRunStatus = field(init=False)
    conditions: dict[str, Condition] = field(init=False)

    def __post_init__(self) -> None:
        status = self.seen.status
        object.__setattr__(self, "status", status)
        object.__setattr__(self, "conditions", {each.type: each for each in status.conditions})

    def says(self, kind: str, status: str) -> Condition | None:
        """A condition if it has this status."""
        found = self.conditions.get(kind)
        return found if found is not None and found.status == status else None

    def because(self, state: State, condition: Condition, *more: str) -> Explanation:
        """A condition as the cause."""
        told = condition.message
        finding = Finding(condition.reason, advice(condition.reason).means, (told,) if told else ())
        return self.found(state, finding, *more)

    def found(self, state: State, finding: Finding, *more: str) -> Explanation:
        """A finding as the cause."""
        known = advice(finding.reason)
        return Explanation(
            run=self.seen.name,
            state=state,
            reason=finding.reason,
            cause=finding.cause,
            evidence=(*finding.evidence, *(line for line in more if line)),
            do=(finding.do or known.do).replace("{run}", self.seen.name),
            runbook=known.runbook,
        )


def explain(seen: Seen, now: datetime) -> Explanation:
    """The first cause that keeps the run from progressing, or that nothing does.

    Raises:
        UserError: the status was written by an operator of another version.
    """
    case = _Case(seen=seen, now=now)
    for question in QUESTIONS:
        answer = question(case)
        if answer is not None:
            return answer
    return _progressing(case)


def _leaving(case: _Case) -> Explanation | None:
    if not pods.is_leaving(case.seen.run):
        return None
    for event in case.seen.events:
        if event.get("reason") == "DataOrphaned":
            return case.found(State.OVER, _by_reason("DataOrphaned", event.get("message", "")))
    for checkpoint in case.seen.checkpoints:
        ready = pods.condition(checkpoint, "Ready")
        if pods.is_leaving(checkpoint) and ready.get("reason") in {"Deleting", "DeletionFailed"}:
            words = f"{pods.name(checkpoint)}: {ready.get('message', '')}"
            return case.found(State.STANDS_STILL, _by_reason(ready["reason"], words))
    left = ", ".join(pods.name(pod) for pod in case.seen.pods)
    evidence = (f"still there: {left}",) if left else ()
    return case.found(State.OVER, Finding("Terminating", "it is being deleted", evidence))


def _by_reason(reason: str, words: str) -> Finding:
    return Finding(reason, advice(reason).means, (words,) if words else ())


def _ended(case: _Case) -> Explanation | None:
    for kind, state in (("Failed", State.FAILED), ("Complete", State.OVER)):
        ended = case.says(kind, "True")
        if ended is not None:
            return case.because(state, ended, _last_failure(case))
    intent = case.status.intent
    if intent is None or intent.type != "Fail":
        return None
    # Decided, though its pods are still on their way out.
    return case.found(State.FAILED, _by_reason(intent.reason, intent.message), _last_failure(case))


def _last_failure(case: _Case) -> str:
    last = case.status.last_failure
    if last is None:
        return ""
    code = "" if last.exit_code is None else f", exit code {last.exit_code}"
    lines = last.message.strip().splitlines()
    words = f": {lines[-1].strip()}" if lines else ""
    return f"last failure, {ago(last.time, case.now)}: {last.pod or last.role}{code}{words}"


def _unobserved(case: _Case) -> Explanation | None:
    """The operator has not looked at the spec as it is."""
    generation = case.seen.run["metadata"].get("generation", 0)
    looked = [each.observed_generation for each in case.status.conditions]
    observed = max([*looked, case.status.observed_generation])
    if looked and observed >= generation:
        return None
    said = "an older spec of the run" if looked else "nothing of the run"
    evidence = (f"observed generation {observed} of {generation}",)
    finding = Finding("OperatorSilent", f"the operator has seen {said}", evidence)
    return case.found(State.STANDS_STILL, finding)


def _resting(case: _Case) -> Explanation | None:
    saved = case.says("CheckpointHealthy", "False")
    late = saved if saved is not None and saved.reason == "SuspendTimeout" else None
    intent = case.status.intent
    if intent is not None and intent.type in {"Suspend", "Release"}:
        suspending = case.conditions.get("Suspended")
        shown = late or suspending
        if shown is not None:
            return case.because(State.WAITS, shown, f"since {ago(intent.since, case.now)}")
    suspended = case.says("Suspended", "True")
    if suspended is None:
        return None
    newest = case.status.last_checkpoint
    at = "" if newest is None else f"it goes on after {newest.name}, step {newest.step}"
    return case.because(State.RESTS, late or suspended, at)


def _refused(case: _Case) -> Explanation | None:
    refused = case.says("Accepted", "False")
    if refused is None:
        return None
    is_again = refused.reason == "ClusterUnavailable"
    return case.because(State.WAITS if is_again else State.STANDS_STILL, refused)


def _blocked(case: _Case) -> Explanation | None:
    """What keeps pods and pools from working; what passes by itself comes last."""
    if case.says("Progressing", "True"):
        return None
    found = sorted(_findings(case), key=lambda each: each.reason in PASSING)
    if not found:
        return None
    first, *others = found
    state = State.WAITS if first.reason in PASSING | {"WaitingForQuota"} else State.STANDS_STILL
    return case.found(state, first, *(f"beside it, {each.cause}" for each in others))


def _findings(case: _Case) -> Iterator[Finding]:
    """The trouble of the pods that the active phase needs, then of its pools."""
    samples = case.seen.samples_now
    needed = [pod for pod in case.seen.pods_of() if samples or pods.labels(pod)[ROLE] == TRAINER]
    unready = [pod for pod in needed if not pods.is_ready(pod)]
    pool = pool_finding(case.seen) if samples else None
    uncreated = uncreated_finding(case.seen)
    pod = pods.first_finding(unready, case.seen.events)
    failed = _failed_before(case)
    if failed is not None and pod is not None and pod.reason == "PodsNotReady":
        pod = None  # it starts because it failed
    found = (uncreated, pod, failed, pool)
    return (each for each in found if each is not None)


def _failed_before(case: _Case) -> Finding | None:
    """The end of a role that is started anew for it, over and over perhaps."""
    last = case.status.last_failure
    degraded = case.says("Degraded", "True")
    if last is None or degraded is None or degraded.reason != "RoleFailed":
        return None
    policy = case.seen.run["spec"].get("failurePolicy") or {}
    count, limit = case.status.restarts.counted, policy.get("maxRestarts", MAX_RESTARTS)
    times = f" {ago(last.time, case.now)}, restart {count} of {limit}"
    end = pods.End(last.pod or last.role, last.exit_code, last.message, times)
    return end.finding("RoleFailed", is_out_of_memory=last.reason == "OOMKilled")


def _roles_unready(case: _Case) -> Explanation | None:
    """What the operator says where we see no pod of which to say more."""
    if case.says("Progressing", "True"):
        return None
    for kind in ("PodsScheduled", "RolesReady", "EnvironmentsReady"):
        found = case.says(kind, "False")
        if found is not None:
            state = State.WAITS if found.reason in PASSING else State.STANDS_STILL
            return case.because(state, found, _last_failure(case))
    return None


def _stalled(case: _Case) -> Explanation | None:
    stalled = case.says("Stalled", "True")
    return None if stalled is None else case.because(State.STANDS_STILL, stalled, _since(case))


def _unready_controller(case: _Case) -> Explanation | None:
    waiting = case.says("Progressing", "False") or case.says("Ready", "False")
    if waiting is None:
        return None
    is_loading = waiting.reason == "Loading"
    return case.because(State.WAITS if is_loading else State.STANDS_STILL, waiting, _since(case))


def _degraded(case: _Case) -> Explanation | None:
    for kind, status in (("Degraded", "True"), ("CheckpointHealthy", "False")):
        found = case.says(kind, status)
        if found is not None:
            state = State.STANDS_STILL if _is_silent(case) else State.PROGRESSES
            return case.because(state, found, _since(case))
    return None


def _silent(case: _Case) -> Explanation | None:
    if not _is_silent(case):
        return None
    crowded = crowded_finding(case.seen)
    if crowded is not None:
        return case.found(State.WAITS, crowded, _since(case))
    finding = Finding("SilentStep", advice("SilentStep").means)
    return case.found(State.WAITS, finding, _since(case))


def _is_silent(case: _Case) -> bool:
    """Whether nothing was heard of a step for long, since the run has pods at least."""
    times = [each for each in (case.status.last_step_time, case.status.active.since) if each]
    if not times or case.status.phase in BUSY:
        return False
    return (case.now - max(map(parsed, times))).total_seconds() > SILENT_S


def _since(case: _Case) -> str:
    last = case.status.last_step_time
    step = case.status.step
    if last is None:
        return ""
    return f"the last step{f', {step.text},' if step else ''} finished {ago(last, case.now)}"


def _progressing(case: _Case) -> Explanation:
    found = case.conditions.get("Progressing")
    reason = found.reason if found is not None else "StepsFinish"
    crowded = crowded_finding(case.seen)
    beside = [*_findings(case), *([] if crowded is None else [crowded])]
    words = [f"beside it, {each.cause}" for each in beside]
    return case.found(State.PROGRESSES, _by_reason(reason, _since(case)), *words)


QUESTIONS: tuple[Callable[[_Case], Explanation | None], ...] = (
    _leaving,
    _ended,
    _unobserved,
    _resting,
    _refused,
    _blocked,
    _roles_unready,
    _stalled,
    _unready_controller,
    _degraded,
    _silent,
)
"""In the order in which one thing waits for the other; the first answer is the cause."""


def now() -> datetime:
    """The present, as `explain` takes it."""
    return datetime.now(UTC)
