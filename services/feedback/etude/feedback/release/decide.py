"""Decision about a route's releases from its state and one piece of evidence; pure.

    candidate ──gate──▶ canary: share 1 → 5 → 10 → 25 → 50 % ──▶ stable
                           │ a guardrail or the primary metric is worse, or nothing shows in time
                           ▼
                        ended: everyone has stable

A freeze stops all arrows but the one down. People promote, roll back, freeze and unfreeze.
"""

from collections.abc import Mapping

from blake3 import blake3
from pydantic import BaseModel, JsonValue

from etude.common.evaluation.gate import GateVerdict, decide_gate
from etude.common.release.channels import ChannelRecord, ServedVersion
from etude.feedback.release.decision import (
    DecisionCase,
    ReleaseAction,
    ReleaseDecision,
    cut_sentence,
)
from etude.feedback.release.evidence import (
    CanaryLook,
    Evidence,
    FreezeRequest,
    MonitorFindings,
    PromoteRequest,
    ProposeRequest,
    ReleaseRequest,
    Request,
    RollbackRequest,
    UnfreezeRequest,
)
from etude.feedback.release.looks import decide_look
from etude.feedback.release.rules import ReleasePolicy, ReleaseRules
from etude.feedback.release.state import CanaryState, ReleaseState


def decide(
    state: ReleaseState, evidence: Evidence, rules: ReleaseRules, *, now_ms: int
) -> ReleaseDecision:
    """Decide; equal arguments give equal decisions.

    Args:
        state: result of all decisions before.
        evidence: one request, look, or answer of monitors.
        rules: of the route now. A canary keeps those of its start, but for the policy.
        now_ms: time of the ledger.
    """
    case = DecisionCase(state=state, rules=rules, now_ms=now_ms, evidence=_describe(evidence))
    if isinstance(evidence, CanaryLook):
        if state.canary is None or state.canary.experiment != evidence.experiment:
            return case.change(ReleaseAction.CONTINUE, "that candidate is not tested any more")
        return decide_look(case, state.canary, evidence)
    if isinstance(evidence, MonitorFindings):
        return _decide_findings(case, evidence)
    return _decide_request(case, evidence)


def adopt_stable(state: ReleaseState, record: ChannelRecord) -> ReleaseDecision:
    """Accept a version that was made the stable one without a decision; a canary ends."""
    name = _name(record.served) if record.served else "nothing"
    after = {"stable": record.served, "previous": state.stable, "canary": None}
    return ReleaseDecision(
        action=ReleaseAction.ADOPT,
        sentence=f"{name} is in use by record {record.number} of the stable channel",
        state=state.model_copy(update=after),
        evidence={"kind": "ChannelRecord", **record.model_dump(mode="json")},
    )


def _decide_request(case: DecisionCase, request: Request) -> ReleaseDecision:
    match request:
        case ProposeRequest():
            return _decide_proposal(case, request)
        case PromoteRequest():
            return _decide_promotion(case, request)
        case RollbackRequest():
            return _decide_rollback(case, request)
        case FreezeRequest():
            return _freeze(case, f"frozen by {_describe_caller(request)}")
        case UnfreezeRequest():
            return _decide_unfreeze(case, request)


def _decide_proposal(case: DecisionCase, request: ProposeRequest) -> ReleaseDecision:
    """Start a canary if nothing else is tested and the gate lets the candidate pass."""
    problem = _find_proposal_problem(case, request)
    if problem:
        return case.refuse(problem)
    gate = decide_gate(
        request.gate.comparisons,
        case.rules.gate.to_rules(request.gate.comparisons),
        min_tasks=case.rules.gate.min_tasks,
        findings=request.gate.findings,
    )
    name = _name(request.candidate)
    if gate.verdict is not GateVerdict.PASSED:
        return case.change(ReleaseAction.REFUSE, f"{name} stopped by the gate: {gate.sentence}")
    canary = _new_canary(case, request.candidate, gate.sentence)
    share = f"{canary.share / 100:g} % of users"
    sentence = f"{name} goes to {share}, compared with as many on stable: gate {gate.sentence}"
    return case.change(ReleaseAction.START, sentence, canary=canary)


def _find_proposal_problem(case: DecisionCase, request: ProposeRequest) -> str:
    """Reason for which the gate is not asked; empty if there is none."""
    stable, compared = case.state.stable, request.gate.compared_with
    if case.freeze:
        return case.freeze
    if case.state.canary is not None:
        return f"{_name(case.state.canary.candidate)} is being tested"
    if stable is None:
        return "no version is in use: promote the first one without a gate"
    if request.candidate.is_same(stable):
        return f"{_name(stable)} is in use"
    if not compared.is_same(stable):
        return f"evaluated against {_name(compared)}, but {_name(stable)} is in use"
    return ""


def _new_canary(case: DecisionCase, candidate: ServedVersion, gate: str) -> CanaryState:
    # Of versions and time, so that a repeated decision draws the same arms, and no two canaries of
    # one candidate do.
    text = f"{candidate.run_uid} {candidate.version} {case.state.stable} {case.now_ms}"
    digest = blake3(text.encode()).hexdigest(16)
    return CanaryState(
        candidate=candidate,
        experiment=f"canary-{digest[:12]}",
        salt=digest[12:],
        rules=case.rules.canary,
        started_ms=case.now_ms,
        step_ms=case.now_ms,
        gate=cut_sentence(gate),
    )


def _decide_promotion(case: DecisionCase, request: PromoteRequest) -> ReleaseDecision:
    """Promote the candidate under test, or another version whose promoter takes the risk."""
    canary = case.state.canary
    version = request.version or (canary.candidate if canary else None)
    if version is not None and canary is not None and version.is_same(canary.candidate):
        version = canary.candidate
    if version is None:
        return case.refuse("no candidate is tested: name a version")
    problem = _find_promotion_problem(case, version, without_gate=request.without_gate)
    if problem:
        return case.refuse(problem)
    name, by = _name(version), _describe_caller(request)
    if canary is None:
        return case.promote(version, f"{name} promoted without a passed gate by {by}")
    why = f"better by {canary.gain}" if canary.gain else "before users showed that it is better"
    return case.promote(version, f"{name} promoted by {by}; {why}")


def _find_promotion_problem(
    case: DecisionCase, version: ServedVersion, *, without_gate: bool
) -> str:
    """Reason for which a version is not promoted though a person asks; empty if there is none."""
    canary = case.state.canary
    if case.freeze:
        return case.freeze
    if version.is_same(case.state.stable):
        return f"{_name(version)} is in use"
    if canary is not None and version != canary.candidate:
        return f"{_name(canary.candidate)} is being tested: roll it back first"
    if canary is None and not without_gate:
        return f"{_name(version)} passed no gate: propose it, or ask for a promotion without gate"
    return ""


def _decide_rollback(case: DecisionCase, request: RollbackRequest) -> ReleaseDecision:
    """Roll back without waiting for figures or an end of a freeze."""
    stable, previous, canary = case.state.stable, case.state.previous, case.state.canary
    version = request.version or (canary.candidate if canary else stable)
    by = _describe_caller(request)
    if canary is not None and canary.candidate.is_same(version):
        return case.end_canary(f"{_name(canary.candidate)} rolled back by {by}")
    if version is None or not version.is_same(stable):
        return case.refuse("that version is neither in use nor tested")
    if previous is None:
        return case.refuse(f"no version is known that was in use before {_name(version)}")
    # A canary ends too: its control would be another version from here on.
    return case.change(
        ReleaseAction.ROLL_BACK,
        f"{_name(version)} rolled back to {_name(previous)} by {by}",
        stable=previous,
        previous=None,
        canary=None,
    )


def _decide_unfreeze(case: DecisionCase, request: UnfreezeRequest) -> ReleaseDecision:
    if case.rules.policy is ReleasePolicy.FROZEN:
        return case.refuse(f"{case.freeze}: change it there")
    if not case.state.freeze:
        return case.refuse("nothing is frozen")
    sentence = f"unfrozen by {_describe_caller(request)}; it was {case.state.freeze}"
    return case.change(ReleaseAction.UNFREEZE, sentence, freeze="")


def _decide_findings(case: DecisionCase, findings: MonitorFindings) -> ReleaseDecision:
    """Freeze for findings of a window that no decision has heard of yet."""
    window = findings.window
    if window <= case.state.window:
        return case.change(ReleaseAction.CONTINUE, f"window {window} is known")
    sentence = f"frozen by monitors of window {window}: {'; '.join(findings.sentences)}"
    return _freeze(case, sentence, window=window)


def _freeze(case: DecisionCase, sentence: str, **fields: object) -> ReleaseDecision:
    return case.change(ReleaseAction.FREEZE, sentence, freeze=cut_sentence(sentence), **fields)


def _describe(evidence: Evidence) -> Mapping[str, JsonValue]:
    """The evidence as JSON; the figures of a look come with its verdict."""
    content: Mapping[str, JsonValue] = {}
    if isinstance(evidence, BaseModel):
        content = evidence.model_dump(mode="json")
    elif isinstance(evidence, MonitorFindings):
        content = {"window": evidence.window, "findings": list(evidence.sentences)}
    return {"kind": type(evidence).__name__, **content}


def _describe_caller(request: ReleaseRequest) -> str:
    return f"{request.caller}: {request.reason}" if request.reason else request.caller


def _name(served: ServedVersion) -> str:
    text = str(served.version)
    return f"{text} ({served.checkpoint})" if served.checkpoint else text
