"""Next step with a route's candidate: evaluate the newest checkpoint, then propose the result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.api.evaluation.spec import EvaluationPlan
from etude.common.api.kinds import Checkpoint, EvalRun, PolicyRoute
from etude.common.api.route.release import RoutePolicy
from etude.common.api.route.request import RequestedAction, RouteRequest
from etude.common.api.route.status import EvaluatedCandidate
from etude.common.errors import InvalidFieldError
from etude.common.release.proposal import build_proposal
from etude.common.weights import VersionId
from etude.operator import names
from etude.operator.actions import Action, Apply, Delete, RecordEvent
from etude.operator.conditions import ACCEPTED, ConditionFact, false_condition, true_condition
from etude.operator.evaluations.status import COMPLETE, FAILED, is_over
from etude.operator.manifests import Manifest, Ref
from etude.operator.reasons import Reason
from etude.operator.remotes.release_order import ReleaseOrder
from etude.operator.remotes.report_store import ReleaseAnswer
from etude.operator.routes.candidates import (
    evaluation_manifest,
    find_baseline,
    find_candidates,
    find_checkpoint,
    has_plan,
    is_under_way,
    position_of,
)
from etude.operator.routes.releases import MAX_NAME, MAX_SENTENCE
from etude.v1 import release_pb2

PROPOSED = "CandidateProposed"
NOT_ACCEPTED = (ACCEPTED, "False")
MAX_KEPT = 10
"""Finished evaluations of a route that are kept, beside those in use."""
MAX_NUMBER = 2**63 - 1
"""Largest integer of a status; a service may tell a larger one."""
POLL_S = 30.0
"""No event tells of a checkpoint that has become Ready."""
WARNED = frozenset(
    {
        *(Reason.EVALUATION_FAILED, Reason.NOT_ENOUGH_DATA, Reason.GATE_REFUSED),
        *(Reason.PROPOSAL_REFUSED, Reason.NO_BASELINE),
    }
)
"""Reasons that a person should hear of."""
REFUSALS = {"Refused": Reason.GATE_REFUSED, "NotEnoughData": Reason.NOT_ENOUGH_DATA}
"""Reasons of a refusal, by the verdict of the evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseInputs:
    """Everything that steps with requests and candidates depend on, apart from the route."""

    checkpoints: Mapping[str, Checkpoint] = field(default_factory=dict)
    """Of the run that the route serves, by name."""
    evaluations: Mapping[str, EvalRun] = field(default_factory=dict)
    """Of the namespace, by name."""
    report: release_pb2.GetReleaseStatusResponse | None = None
    """Newest one of the feedback service."""
    target: str | None = None
    """The feedback service; None if it is not ready."""
    answer: ReleaseAnswer | None = None
    """Newest one of the feedback service."""


class CandidateStep(NamedTuple):
    """The next step with a route's candidate."""

    candidate: EvaluatedCandidate | None
    """For the status."""
    fact: ConditionFact | None = None
    actions: tuple[Action, ...] = ()
    order: ReleaseOrder | None = None
    """Proposes the candidate; None if nothing is to be proposed."""


def next_candidate(route: PolicyRoute, inputs: ReleaseInputs) -> CandidateStep:
    """Decide about new checkpoints of a route's run. No I/O, no clock."""
    plan = route.spec.gate.evaluation
    if plan is None:
        others = tuple(_remove_others(_owned(route, inputs), set()))
        return CandidateStep(route.status.candidate, actions=others)
    step = _next_step(route, plan, inputs)
    fact = step.fact
    if fact is None or fact.reason not in WARNED or _is_known(route, fact):
        return step
    about = step.candidate.evaluation if step.candidate else ""
    event = RecordEvent(
        name=f"{fact.reason}-{about}", reason=fact.reason, message=fact.message, is_warning=True
    )
    return step._replace(actions=(*step.actions, event))


def _is_known(route: PolicyRoute, fact: ConditionFact) -> bool:
    return any(
        (each.type, each.reason, each.message) == (fact.type, fact.reason, fact.message)
        for each in route.status.conditions
    )


def _next_step(route: PolicyRoute, plan: EvaluationPlan, inputs: ReleaseInputs) -> CandidateStep:
    report, before = inputs.report, route.status.candidate
    if report is not None and report.HasField("canary"):
        before = _tested_candidate(before, report.canary.candidate, inputs)
    waiting = _waiting_fact(route, inputs)
    if waiting is not None or report is None:
        return CandidateStep(before, waiting)
    stable = report.stable
    candidates = find_candidates(list(inputs.checkpoints.values()), stable, before)
    if not candidates or _is_outdated(report, inputs.answer):
        return CandidateStep(before, _settled_fact(before, inputs))
    baseline = _find_baseline(route, plan, stable, inputs)
    if baseline is None:
        what = f"{_describe(stable)} is in use and has neither a Checkpoint nor an EvalRun"
        return CandidateStep(before, false_condition(PROPOSED, Reason.NO_BASELINE, what))
    return _evaluate(route, plan, _Work(candidates, baseline), inputs)


def _waiting_fact(route: PolicyRoute, inputs: ReleaseInputs) -> ConditionFact | None:
    """Reason for which nothing is evaluated now; None if something may be."""
    report, policy = inputs.report, route.spec.policy
    if policy is not RoutePolicy.AUTOMATIC:
        what = f"spec.policy is {policy}: propose with kubectl etude propose"
        return false_condition(PROPOSED, Reason.NOT_AUTOMATIC, what)
    if report is None or inputs.target is None:
        return false_condition(PROPOSED, Reason.NOT_SERVING, "the feedback service is not ready")
    if not report.HasField("stable"):
        what = "no version is in use: promote the first one with kubectl etude promote"
        return false_condition(PROPOSED, Reason.NO_STABLE_VERSION, what)
    if report.HasField("canary"):
        name = _describe(report.canary.candidate)
        return true_condition(PROPOSED, Reason.PROPOSED, f"{name} is tested with users")
    if report.freeze:
        return false_condition(PROPOSED, Reason.NOT_AUTOMATIC, report.freeze[:MAX_SENTENCE])
    return None


def _is_outdated(
    report: release_pb2.GetReleaseStatusResponse, answer: ReleaseAnswer | None
) -> bool:
    """Return true if the service has decided something since it reported."""
    newest = report.decisions[0].number if report.decisions else 0
    return answer is not None and answer.decision.number > newest


def _tested_candidate(
    before: EvaluatedCandidate | None,
    tested: release_pb2.ServedPolicyVersion,
    inputs: ReleaseInputs,
) -> EvaluatedCandidate:
    """The candidate that users try, which is not proposed again."""
    number = min(tested.version.number, MAX_NUMBER)
    if before is not None and before.number == number and before.action:
        return before
    checkpoint = find_checkpoint(inputs.checkpoints.values(), tested)
    return EvaluatedCandidate(
        checkpoint=tested.checkpoint[:MAX_NAME],
        evaluation=before.evaluation if before is not None and before.number == number else "",
        branch=position_of(checkpoint).branch if checkpoint else 0,
        number=number,
        action="StartCanary",
        sentence=f"{_describe(tested)} is tested with users"[:MAX_SENTENCE],
    )


def _settled_fact(before: EvaluatedCandidate | None, inputs: ReleaseInputs) -> ConditionFact:
    """The condition while nothing is newer than what was tried."""
    if before is None or not before.action:
        what = "no checkpoint of the run is newer than the version in use"
        return false_condition(PROPOSED, Reason.NO_NEW_CHECKPOINT, what)
    if before.action != "Refuse":
        # It may have been promoted, or rolled back: status.decision says so.
        what = f"{before.checkpoint or before.number} was proposed, and nothing is newer"
        return true_condition(PROPOSED, Reason.PROPOSED, what)
    evaluation = inputs.evaluations.get(before.evaluation)
    return _answered_fact(before, evaluation.status.verdict if evaluation else "")


def _answered_fact(candidate: EvaluatedCandidate, verdict: str) -> ConditionFact:
    words = candidate.sentence
    if candidate.action != "Refuse":
        return true_condition(PROPOSED, Reason.PROPOSED, words)
    return false_condition(PROPOSED, REFUSALS.get(verdict, Reason.PROPOSAL_REFUSED), words)


class _Work(NamedTuple):
    """Checkpoints to choose from, and the EvalRun of the version in use."""

    candidates: Sequence[Checkpoint]
    baseline: Manifest | str
    """To be made, or the name of one that is finished."""

    @property
    def name(self) -> str:
        """Name of the baseline."""
        if isinstance(self.baseline, str):
            return self.baseline
        return str(self.baseline["metadata"]["name"])


def _find_baseline(
    route: PolicyRoute,
    plan: EvaluationPlan,
    stable: release_pb2.ServedPolicyVersion,
    inputs: ReleaseInputs,
) -> Manifest | str | None:
    """EvalRun of the version in use; None if it has none and cannot be evaluated any more."""
    found = find_baseline(_owned(route, inputs).values(), plan, stable)
    if found is not None:
        return found.metadata.name
    in_use = find_checkpoint(inputs.checkpoints.values(), stable)
    return None if in_use is None else evaluation_manifest(route, plan, in_use, None)


def _owned(route: PolicyRoute, inputs: ReleaseInputs) -> dict[str, EvalRun]:
    """The EvalRuns that the route made."""
    return {
        name: each
        for name, each in inputs.evaluations.items()
        if any(o.controller and o.uid == route.metadata.uid for o in each.metadata.owner_references)
    }


def _evaluate(
    route: PolicyRoute, plan: EvaluationPlan, work: _Work, inputs: ReleaseInputs
) -> CandidateStep:
    """Make the EvalRuns that are missing, or propose the result of those that are there."""
    owned = _owned(route, inputs)
    checkpoint = _choose(work, owned, plan)
    evaluation = evaluation_manifest(route, plan, checkpoint, work.name)
    name, position = str(evaluation["metadata"]["name"]), position_of(checkpoint)
    candidate = EvaluatedCandidate(
        checkpoint=checkpoint.metadata.name,
        evaluation=name,
        branch=position.branch,
        number=position.number,
    )
    others = tuple(_remove_others(owned, {work.name, name}))
    if name in owned and work.name in owned:
        step = _follow(route, candidate, (owned[name], owned[work.name]), inputs)
        return step._replace(actions=others)
    made = [each for each in (work.baseline, evaluation) if isinstance(each, dict)]
    actions = [
        Apply(manifest=each, manager=names.ROUTE_FIELD_MANAGER)
        for each in made
        if each["metadata"]["name"] not in owned
    ]
    what = f"EvalRun {name} compares {candidate.checkpoint} with {work.name}"
    event = RecordEvent(name=f"evaluate-{name}", reason=Reason.EVALUATING, message=what)
    fact = false_condition(PROPOSED, Reason.EVALUATING, what)
    return CandidateStep(candidate, fact, (*others, *actions, event))


def _choose(work: _Work, owned: Mapping[str, EvalRun], plan: EvaluationPlan) -> Checkpoint:
    """The checkpoint whose evaluation has started, else the newest: no waiting one is kept.

    A checkpoint that came while another one is evaluated waits, or none would ever be done.
    """
    begun = {
        each.spec.checkpoint_ref.name
        for each in owned.values()
        if each.spec.checkpoint_ref is not None
        and is_under_way(each)
        and has_plan(each, plan)
        and _baseline_of(each) == work.name
    }
    started = (each for each in work.candidates if each.metadata.name in begun)
    return next(started, work.candidates[0])


def _baseline_of(evaluation: EvalRun) -> str:
    comparison = evaluation.spec.comparison
    return comparison.baseline_ref.name if comparison is not None else ""


def _remove_others(owned: Mapping[str, EvalRun], used: set[str]) -> Iterator[Action]:
    """Delete evaluations that nothing waits for, and finished ones beyond the newest few."""
    others = [each for name, each in sorted(owned.items()) if name not in used]
    over = [each for each in others if is_over(each)]
    over.sort(key=lambda each: each.status.completion_time or "")
    for each in [*(other for other in others if not is_over(other)), *over[:-MAX_KEPT]]:
        if each.metadata.deletion_timestamp is None:
            key = Ref("EvalRun", each.metadata.namespace, each.metadata.name)
            yield Delete(ref=key, uid=each.metadata.uid)


def _follow(
    route: PolicyRoute,
    candidate: EvaluatedCandidate,
    evaluations: tuple[EvalRun, EvalRun],
    inputs: ReleaseInputs,
) -> CandidateStep:
    """Wait for the evaluations of candidate and baseline, then propose the candidate."""
    for each in evaluations:
        if message := _condition_message(each, FAILED):
            what = f"EvalRun {each.metadata.name} failed; delete it to have it repeated: {message}"
            fact = false_condition(PROPOSED, Reason.EVALUATION_FAILED, what)
            return CandidateStep(candidate, fact)
    mine = evaluations[0]
    if not _condition_message(mine, COMPLETE):
        what = f"{candidate.checkpoint}: {'; '.join(map(_describe_progress, evaluations))}"
        return CandidateStep(candidate, false_condition(PROPOSED, Reason.EVALUATING, what))
    order = propose_evaluation(route, mine, inputs)
    if isinstance(order, str):
        return _answer(candidate, "Refuse", order, mine)
    answer = inputs.answer
    if answer is not None and answer.request_id == order.request_id:
        return _answer(candidate, answer.decision.action, answer.decision.sentence, mine)
    what = f"the result of EvalRun {candidate.evaluation} is being proposed"
    return CandidateStep(candidate, false_condition(PROPOSED, Reason.EVALUATING, what), order=order)


def _answer(
    candidate: EvaluatedCandidate, action: str, sentence: str, evaluation: EvalRun
) -> CandidateStep:
    found = {"action": action[:MAX_NAME], "sentence": sentence[:MAX_SENTENCE]}
    answered = candidate.model_copy(update=found)
    return CandidateStep(answered, _answered_fact(answered, evaluation.status.verdict))


def _describe_progress(evaluation: EvalRun) -> str:
    """Phase of an evaluation, and what it waits for."""
    waits = [e.message for e in evaluation.status.conditions if (e.type, e.status) == NOT_ACCEPTED]
    words = f"EvalRun {evaluation.metadata.name} is {evaluation.status.phase or 'Pending'}"
    return f"{words}, {waits[0]}" if waits else words


def _condition_message(evaluation: EvalRun, kind: str) -> str:
    """Message of a condition that is True; empty if it is not."""
    for each in evaluation.status.conditions:
        if each.type == kind and each.status == "True":
            return each.message or kind
    return ""


def propose_evaluation(
    route: PolicyRoute, evaluation: EvalRun, inputs: ReleaseInputs
) -> ReleaseOrder | str:
    """The order that proposes the checkpoint of an evaluation, or the reason that forbids it.

    Its id is that of the evaluation: a proposal that is sent again is answered as before.
    """
    name = evaluation.metadata.name
    if not _condition_message(evaluation, COMPLETE):
        return f"EvalRun {name} is {evaluation.status.phase or 'Pending'}, not Complete"
    named = evaluation.spec.checkpoint_ref
    if named is None:
        return f"EvalRun {name} is of a model at an endpoint, which no engine of ours can serve"
    checkpoint = named.name
    if checkpoint not in inputs.checkpoints:
        return f"{checkpoint} of EvalRun {name} is no Checkpoint of the route's run"
    if inputs.report is None or inputs.target is None:
        return "the feedback service is not ready"
    try:
        proposal = build_proposal(
            evaluation.status,
            inputs.report.stable,
            run_uid=route.status.run_uid,
            checkpoint=checkpoint,
        )
    except InvalidFieldError as error:
        return f"EvalRun {name}: {error}"
    request = RouteRequest(action=RequestedAction.PROPOSE, evaluation=name, key="operator")
    return ReleaseOrder(
        target=inputs.target,
        request_id=f"propose-{evaluation.metadata.uid}",
        request=request,
        run_uid=route.status.run_uid,
        proposal=proposal,
        asked_by="",
    )


def _describe(served: release_pb2.ServedPolicyVersion) -> str:
    version = str(VersionId.from_proto(served.version))
    return f"{version} ({served.checkpoint})" if served.checkpoint else version
