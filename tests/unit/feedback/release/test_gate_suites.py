"""A gate over suites: every margin in each of them; versions are known without Checkpoints."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.feedback.releases import RULES, gate, version

from etude.common.evaluation.gate import decide_gate
from etude.feedback.release.decide import decide
from etude.feedback.release.evidence import (
    GateEvidence,
    PromoteRequest,
    ProposeRequest,
    Request,
    RollbackRequest,
)
from etude.feedback.release.rules import ReleaseRules
from etude.feedback.release.state import ReleaseState

NAMED = version(41).model_copy(update={"checkpoint": "demo-s00000041-abcdef"})
STATE = ReleaseState(stable=version(40), previous=version(39))
SUITES = st.lists(st.sampled_from(["held-out", "attacks", "of", "a-b"]), unique=True)


def evidence(suites: Sequence[str], difference: float = 0.01) -> GateEvidence:
    measured = gate(40, difference).comparisons["success"]
    comparisons = {f"success of {suite}": measured for suite in suites}
    return GateEvidence(compared_with=version(40), comparisons=comparisons)


def with_suites(suites: Sequence[str]) -> ReleaseRules:
    rules = RULES.gate.model_copy(update={"suites": tuple(suites)})
    return RULES.model_copy(update={"gate": rules})


@given(SUITES, SUITES, st.sampled_from([0.01, -0.041]))
def test_a_candidate_passes_only_with_every_suite_of_the_gate(
    wanted: list[str], measured: list[str], difference: float
) -> None:
    request = ProposeRequest(
        caller="operator", candidate=NAMED, gate=evidence(measured, difference)
    )
    decision = decide(STATE, request, with_suites(wanted), now_ms=1)
    is_good = difference > 0 and bool(measured)
    passes = is_good and set(wanted) <= set(measured)
    assert (decision.action.value == "StartCanary") == passes
    missing = set(wanted) - set(measured)
    if missing and difference > 0:
        assert any(f"success of {each} was not measured" in decision.sentence for each in missing)


def test_a_suite_of_attacks_that_was_not_measured_lets_nothing_pass() -> None:
    attacks = RULES.gate.model_copy(update={"attack_suites": ("red",)})
    rules = RULES.model_copy(update={"gate": attacks})
    request = ProposeRequest(caller="operator", candidate=NAMED, gate=evidence(["held-out"]))
    decision = decide(STATE, request, rules, now_ms=1)
    assert decision.action.value == "Refuse"
    assert "Attacks of red was not measured" in decision.sentence


@given(SUITES)
def test_without_suites_of_its_own_a_gate_judges_those_that_were_measured(
    measured: list[str],
) -> None:
    comparisons = dict(evidence(measured, -0.041).comparisons)
    rules = RULES.gate.to_rules(comparisons)
    expected = sorted(f"success of {suite}" for suite in measured) or ["success"]
    assert [each.metric for each in rules] == expected
    verdict = decide_gate(comparisons, rules, min_tasks=100).verdict.value
    assert verdict == ("Refused" if measured else "NotEnoughData")


@pytest.mark.parametrize(
    ("request_of", "action"),
    [(PromoteRequest, "Promote"), (RollbackRequest, "Rollback")],
    ids=["promote", "rollback"],
)
def test_people_name_a_candidate_without_its_checkpoint(
    request_of: type[PromoteRequest | RollbackRequest], action: str
) -> None:
    proposal = ProposeRequest(caller="operator", candidate=NAMED, gate=gate(40))
    tested = decide(STATE, proposal, RULES, now_ms=1).state
    request: Request = request_of(caller="alice", version=version(41))
    decision = decide(tested, request, RULES, now_ms=2)
    assert decision.action.value == action
    assert decision.state.canary is None
    assert decision.state.stable == (NAMED if action == "Promote" else version(40))
