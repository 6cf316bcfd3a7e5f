"""Sentences of release decisions, as people read them."""

import json
from collections.abc import Sequence

import pytest
from tests.support.feedback.releases import RULES, gate, look, of_state, version, with_policy

from etude.feedback.release.decide import decide
from etude.feedback.release.decision import ReleaseAction, ReleaseDecision
from etude.feedback.release.evidence import (
    Evidence,
    FreezeRequest,
    MonitorFindings,
    PromoteRequest,
    ProposeRequest,
    RollbackRequest,
    UnfreezeRequest,
)
from etude.feedback.release.rules import ReleaseRules
from etude.feedback.release.state import ReleaseState

HOUR_MS = 3_600_000
PROPOSE = ProposeRequest(caller="operator", candidate=version(41), gate=gate(40))
BETTER = look(2_000, kept=(0.6, 0.66))
WORSE = look(1_607, errors=(0.02, 0.045))
COMPLAINTS = look(1_600, complaints=(0.1, 0.16))
FREEZE = FreezeRequest(caller="alice", reason="looks odd")
FIRST = PromoteRequest(caller="alice", version=version(40), without_gate=True, reason="first")


def run(evidence: Sequence[Evidence], rules: ReleaseRules = RULES) -> ReleaseDecision:
    """Decide about each in turn, a quarter of an hour apart, with 1.40 in use at first."""
    state, decisions = ReleaseState(stable=version(40), previous=version(39)), []
    for index, each in enumerate(evidence):
        decisions.append(
            decide(state, of_state(each, state), rules, now_ms=HOUR_MS + index * HOUR_MS // 4)
        )
        state = decisions[-1].state
    return decisions[-1]


CASES: Sequence[tuple[Sequence[Evidence], ReleaseAction, str]] = [
    (
        [PROPOSE],
        ReleaseAction.START,
        "1.41 goes to 10 % of users, compared with as many on stable: gate passed: success better"
        " by 1.0 points, lower 95 % bound 0.0 points, margin -2.0 points, 400 tasks",
    ),
    (
        [ProposeRequest(caller="operator", candidate=version(41), gate=gate(40, -0.041))],
        ReleaseAction.REFUSE,
        "1.41 stopped by the gate: refused: success worse by 4.1 points, lower 95 % bound"
        " -5.1 points, margin -2.0 points, 400 tasks",
    ),
    (
        [
            ProposeRequest(
                caller="operator", candidate=version(41), gate=gate(40, 0.01, "judge gap")
            )
        ],
        ReleaseAction.REFUSE,
        "1.41 stopped by the gate: refused: judge gap",
    ),
    (
        [ProposeRequest(caller="operator", candidate=version(41), gate=gate(39))],
        ReleaseAction.REFUSE,
        "refused: evaluated against 1.39, but 1.40 is in use",
    ),
    (
        [PROPOSE, look(800)],
        ReleaseAction.GROW,
        "goes to 25 % of users: continues: edit persistence +0.0 points, 95 % interval"
        " [-8.2, 8.2], 1,600 users, 40 % of those planned",
    ),
    (
        [PROPOSE, look(150)],
        ReleaseAction.CONTINUE,
        "not enough data: edit persistence has 150 of the 200 users an arm below which nothing is"
        " decided",
    ),
    (
        [PROPOSE, WORSE],
        ReleaseAction.ROLL_BACK,
        "rolled back: error rate +2.5 points, 99 % interval [0.1, 4.9], 3,214 users",
    ),
    (
        [PROPOSE, look(800), BETTER],
        ReleaseAction.PROMOTE,
        "promoted: edit persistence +6.0 points, 95 % interval [3.0, 9.0], 4,000 users",
    ),
    (
        [PROPOSE, look(2_000)],
        ReleaseAction.ROLL_BACK,
        "rolled back: not enough data: edit persistence +0.0 points, 95 % interval [-3.0, 3.0],"
        " 4,000 users, and no more are planned",
    ),
    (
        [PROPOSE, look(1_000, control_users=1_200)],
        ReleaseAction.ROLL_BACK,
        "rolled back: invalid: the arms have 1,200 and 1,000 users, which an even split ever"
        " reaches with p = 0.0008",
    ),
    (
        [PROPOSE, COMPLAINTS],
        ReleaseAction.ASK,
        "paused for a person: complaints +6.0 points, 99 % interval [1.5, 10.5], 3,200 users",
    ),
    (
        [PROPOSE, COMPLAINTS, WORSE],
        ReleaseAction.ROLL_BACK,
        "rolled back: error rate +2.5 points, 99 % interval [0.1, 4.9], 3,214 users",
    ),
    (
        [PROPOSE, COMPLAINTS, PromoteRequest(caller="alice", reason="a joke in the text")],
        ReleaseAction.PROMOTE,
        "1.41 promoted by alice: a joke in the text; before users showed that it is better",
    ),
    (
        [PROPOSE, RollbackRequest(caller="alice")],
        ReleaseAction.ROLL_BACK,
        "1.41 rolled back by alice",
    ),
    (
        [RollbackRequest(caller="alice", reason="slow")],
        ReleaseAction.ROLL_BACK,
        "1.40 rolled back to 1.39 by alice: slow",
    ),
    (
        [RollbackRequest(caller="alice"), RollbackRequest(caller="alice")],
        ReleaseAction.REFUSE,
        "refused: no version is known that was in use before 1.39",
    ),
    (
        [PROPOSE, RollbackRequest(caller="alice", version=version(40))],
        ReleaseAction.ROLL_BACK,
        "1.40 rolled back to 1.39 by alice",
    ),
    (
        [PromoteRequest(caller="alice", version=version(50))],
        ReleaseAction.REFUSE,
        "refused: 1.50 passed no gate: propose it, or ask for a promotion without gate",
    ),
    (
        [PromoteRequest(caller="alice", version=version(50), without_gate=True)],
        ReleaseAction.PROMOTE,
        "1.50 promoted without a passed gate by alice",
    ),
    (
        [PROPOSE, PromoteRequest(caller="alice", version=version(50), without_gate=True)],
        ReleaseAction.REFUSE,
        "refused: 1.41 is being tested: roll it back first",
    ),
    (
        [PromoteRequest(caller="alice")],
        ReleaseAction.REFUSE,
        "refused: no candidate is tested: name a version",
    ),
    ([FREEZE], ReleaseAction.FREEZE, "frozen by alice: looks odd"),
    ([FREEZE, PROPOSE], ReleaseAction.REFUSE, "refused: frozen by alice: looks odd"),
    (
        [PROPOSE, FREEZE, BETTER],
        ReleaseAction.ASK,
        "better, and waits for a person (frozen by alice: looks odd): edit persistence +6.0"
        " points, 95 % interval [3.0, 9.0], 4,000 users",
    ),
    (
        [PROPOSE, FREEZE, BETTER, UnfreezeRequest(caller="bob"), BETTER],
        ReleaseAction.PROMOTE,
        "promoted: edit persistence +6.0 points, 95 % interval [3.0, 9.0], 4,000 users",
    ),
    (
        [FREEZE, UnfreezeRequest(caller="bob")],
        ReleaseAction.UNFREEZE,
        "unfrozen by bob; it was frozen by alice: looks odd",
    ),
    ([UnfreezeRequest(caller="bob")], ReleaseAction.REFUSE, "refused: nothing is frozen"),
    (
        [MonitorFindings(window=7, sentences=("broken calls 31 %, limit 10 %",))],
        ReleaseAction.FREEZE,
        "frozen by monitors of window 7: broken calls 31 %, limit 10 %",
    ),
]


@pytest.mark.parametrize(("evidence", "action", "sentence"), CASES)
def test_a_decision_says_why(
    evidence: Sequence[Evidence], action: ReleaseAction, sentence: str
) -> None:
    decision = run(evidence)
    assert (decision.action, decision.sentence) == (action, sentence)
    assert json.loads(json.dumps(decision.evidence, allow_nan=False)) == decision.evidence


def test_a_manual_policy_grows_and_waits_for_a_person_to_promote() -> None:
    manual = with_policy("Manual")
    grown = run([PROPOSE, look(800)], manual)
    assert grown.action is ReleaseAction.GROW
    asked = run([PROPOSE, look(800), BETTER], manual)
    assert asked.sentence.startswith("better, and waits for a person (the policy is Manual): edit")
    again = run([PROPOSE, look(800), BETTER, BETTER], manual)
    assert again.action is ReleaseAction.CONTINUE
    promoted = run([PROPOSE, look(800), BETTER, PromoteRequest(caller="alice")], manual)
    assert promoted.sentence == (
        "1.41 promoted by alice; better by edit persistence +6.0 points, 95 % interval [3.0, 9.0],"
        " 4,000 users"
    )


def test_a_frozen_policy_rolls_back_alone() -> None:
    frozen = with_policy("Frozen")
    assert run([PROPOSE], frozen).sentence == "refused: the policy of the route is Frozen"
    assert run([UnfreezeRequest(caller="bob")], frozen).action is ReleaseAction.REFUSE
    assert run([RollbackRequest(caller="alice")], frozen).action is ReleaseAction.ROLL_BACK


def test_the_first_version_is_promoted_by_a_person() -> None:
    proposed = decide(ReleaseState(), PROPOSE, RULES, now_ms=0)
    assert proposed.sentence == (
        "refused: no version is in use: promote the first one without a gate"
    )
    first = decide(ReleaseState(), FIRST, RULES, now_ms=0)
    assert (first.state.stable, first.state.previous) == (version(40), None)
    assert first.sentence == "1.40 promoted without a passed gate by alice: first"


def test_a_step_lasts_its_time_however_many_users_come() -> None:
    start = decide(ReleaseState(stable=version(40)), PROPOSE, RULES, now_ms=0)
    soon = decide(start.state, of_state(look(800), start.state), RULES, now_ms=599_999)
    assert soon.action is ReleaseAction.CONTINUE
    assert (
        decide(soon.state, of_state(look(900), soon.state), RULES, now_ms=600_000).action
        is ReleaseAction.GROW
    )


def test_each_look_is_remembered_for_the_next() -> None:
    decision = run([PROPOSE, look(800), look(800), look(1_400)])
    assert decision.state.canary is not None
    assert decision.state.canary.looks == (0.4, 0.7)


def test_a_canary_that_takes_too_long_has_a_last_look() -> None:
    start = decide(ReleaseState(stable=version(40)), PROPOSE, RULES, now_ms=0)
    # What is not enough at 40 % of the planned users is enough if no more will come.
    figures = look(800, kept=(0.6, 0.66))
    assert (
        decide(start.state, of_state(figures, start.state), RULES, now_ms=0).action
        is ReleaseAction.CONTINUE
    )
    end_ms = 1_000 * RULES.canary.max_seconds
    assert (
        decide(start.state, of_state(figures, start.state), RULES, now_ms=end_ms).action
        is ReleaseAction.PROMOTE
    )
    ended = decide(start.state, of_state(look(150), start.state), RULES, now_ms=end_ms)
    assert ended.action is ReleaseAction.ROLL_BACK
    assert ended.sentence.startswith("rolled back: not enough data: edit persistence has 150")


def test_a_look_at_users_of_an_earlier_canary_decides_nothing() -> None:
    stop = RollbackRequest(caller="alice")
    first, second = run([PROPOSE]), run([PROPOSE, stop, PROPOSE])
    late = of_state(WORSE, first.state)
    assert decide(second.state, late, RULES, now_ms=2 * HOUR_MS).state == second.state


def test_findings_of_a_window_freeze_once() -> None:
    findings = MonitorFindings(window=7, sentences=("broken calls 31 %",))
    known = run([findings, UnfreezeRequest(caller="bob"), findings])
    assert (known.action, known.state.freeze) == (ReleaseAction.CONTINUE, "")


def test_a_candidate_that_is_tried_again_meets_other_arms() -> None:
    stop = RollbackRequest(caller="alice")
    first, second = run([PROPOSE]), run([PROPOSE, stop, PROPOSE])
    assert first.state.canary is not None
    assert second.state.canary is not None
    assert first.state.canary.assignment != second.state.canary.assignment
    repeated = run([PROPOSE])
    assert repeated.state == first.state


def test_a_long_reason_is_cut() -> None:
    sentences = tuple("x" * 256 for _ in range(8))
    frozen = run([MonitorFindings(window=1, sentences=sentences)])
    assert len(frozen.sentence) == len(frozen.state.freeze) == 1_024
    assert frozen.sentence.endswith("…")
