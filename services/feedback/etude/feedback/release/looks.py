"""Decision at a look at a canary's users: grow, ask, promote or roll back; pure."""

from dataclasses import replace

from etude.feedback.experiments.verdict import (
    CanaryAction,
    CanaryVerdict,
    decide_canary,
    users_per_arm,
)
from etude.feedback.release.decision import (
    DecisionCase,
    ReleaseAction,
    ReleaseDecision,
    cut_sentence,
)
from etude.feedback.release.evidence import CanaryLook
from etude.feedback.release.rules import ReleasePolicy
from etude.feedback.release.state import CanaryState


def decide_look(case: DecisionCase, canary: CanaryState, look: CanaryLook) -> ReleaseDecision:
    """Act on the figures of both arms.

    Harm ends the canary also while a person is asked or everything is frozen.
    """
    is_asked = bool(canary.question or canary.gain)
    is_over = case.now_ms - canary.started_ms >= 1_000 * canary.rules.max_seconds
    # A last look spends all of alpha: not while a person is asked, who may take longer.
    is_final = is_over and not is_asked
    data = replace(look.data, looks=canary.looks, is_final=is_final)
    verdict = decide_canary(canary.rules.to_plan(), data)
    case = replace(case, evidence={**case.evidence, "figures": dict(verdict.evidence)})
    canary = canary.model_copy(update={"looks": verdict.looks})
    match verdict.action:
        case CanaryAction.ROLLBACK:
            return case.end_canary(verdict.sentence)
        case CanaryAction.INVALID:
            return case.end_canary(f"rolled back: {verdict.sentence}")
        case CanaryAction.PAUSE:
            return _ask_about_signal(case, canary, verdict)
        case CanaryAction.PROMOTE:
            return _ask_about_gain(case, canary, verdict, look)
        case CanaryAction.CONTINUE | CanaryAction.NOT_ENOUGH_DATA:
            has_ended = is_final or max(canary.looks, default=0.0) >= 1
            if has_ended and not is_asked:
                return case.end_canary(f"rolled back: {verdict.sentence}")
            return _advance(case, canary, verdict, look)


def _ask_about_signal(
    case: DecisionCase, canary: CanaryState, verdict: CanaryVerdict
) -> ReleaseDecision:
    if canary.question:
        return case.keep(canary, verdict.sentence)
    question = cut_sentence(verdict.sentence)
    canary = canary.model_copy(update={"question": question})
    return case.change(ReleaseAction.ASK, question, canary=canary)


def _ask_about_gain(
    case: DecisionCase, canary: CanaryState, verdict: CanaryVerdict, look: CanaryLook
) -> ReleaseDecision:
    """Remember that the candidate is better; say so once if a person has to promote it."""
    is_news = not canary.gain
    gain = cut_sentence(verdict.sentence.removeprefix("promoted: "))
    canary = canary.model_copy(update={"gain": gain})
    why = _find_obstacle(case, canary)
    if why and is_news:
        sentence = f"better, and waits for a person ({why}): {gain}"
        return case.change(ReleaseAction.ASK, sentence, canary=canary)
    return _advance(case, canary, verdict, look)


def _advance(
    case: DecisionCase, canary: CanaryState, verdict: CanaryVerdict, look: CanaryLook
) -> ReleaseDecision:
    """Promote a candidate that is better, or raise the share, unless a person has to agree."""
    if canary.gain and not _find_obstacle(case, canary):
        return case.promote(canary.candidate, f"promoted: {canary.gain}")
    is_asked = canary.question or canary.gain
    if is_asked or case.freeze or not _may_grow(case, canary, look):
        return case.keep(canary, verdict.sentence)
    larger = canary.model_copy(update={"step": canary.step + 1, "step_ms": case.now_ms})
    sentence = f"goes to {larger.share / 100:g} % of users: {verdict.sentence}"
    return case.change(ReleaseAction.GROW, sentence, canary=larger)


def _find_obstacle(case: DecisionCase, canary: CanaryState) -> str:
    """Reason for which a person has to promote a candidate that is better; empty if none has."""
    if canary.question:
        return canary.question
    if case.freeze:
        return case.freeze
    return "" if case.rules.policy is ReleasePolicy.AUTOMATIC else "the policy is Manual"


def _may_grow(case: DecisionCase, canary: CanaryState, look: CanaryLook) -> bool:
    """Return true if the step had its time, and harm would have shown by now."""
    if canary.step + 1 == len(canary.rules.steps):
        return False
    if case.now_ms - canary.step_ms < 1_000 * canary.rules.step_seconds:
        return False
    plan = canary.rules.to_plan()
    return all(users_per_arm(each, look.data) >= plan.min_users for each in plan.guardrails)
