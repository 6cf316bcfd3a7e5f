"""The gate: golden sentences, and no candidate passes that a rule does not let pass."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.evaluation.comparison import PairedDifference, SampleCounts
from etude.common.evaluation.gate import GateDecision, GateVerdict, MarginRule, decide_gate

SUCCESS = MarginRule(metric="success", margin=0.02)
SECONDS = MarginRule(metric="seconds", margin=1.5, is_share=False, less_is_better=True)


def _difference(difference: float, low: float, high: float, num_tasks: int) -> PairedDifference:
    return PairedDifference(
        num_tasks=num_tasks, num_unpaired=0, difference=difference, low=low, high=high
    )


BETTER = _difference(0.031, 0.012, 0.05, 256)
SLOWER = _difference(0.4, -0.1, 0.9, 256)


def _decide(
    success: PairedDifference, seconds: PairedDifference = SLOWER, *findings: str
) -> GateDecision:
    comparisons = {"success": success, "seconds": seconds}
    return decide_gate(comparisons, [SUCCESS, SECONDS], min_tasks=100, findings=findings)


def test_a_candidate_within_all_margins_passes() -> None:
    decision = _decide(BETTER)
    assert decision.verdict is GateVerdict.PASSED
    assert decision.sentence == (
        "passed: success better by 3.1 points, lower 95 % bound 1.2 points, margin -2.0 points,"
        " 256 tasks; seconds worse by 0.4, lower 95 % bound -0.9, margin -1.5, 256 tasks"
    )


def test_a_candidate_that_lost_its_margin_is_refused() -> None:
    decision = _decide(_difference(-0.041, -0.079, -0.003, 120))
    assert decision.verdict is GateVerdict.REFUSED
    assert decision.sentence == (
        "refused: success worse by 4.1 points, lower 95 % bound -7.9 points,"
        " margin -2.0 points, 120 tasks"
    )


def test_more_seconds_are_worse() -> None:
    decision = _decide(BETTER, _difference(1.75, 1.2, 2.3, 256))
    assert decision.sentence == (
        "refused: seconds worse by 1.75, lower 95 % bound -2.3, margin -1.5, 256 tasks"
    )


ATTACKS = MarginRule(metric="Attacks of red", margin=0.1, less_is_better=True, is_level=True)


@pytest.mark.parametrize(
    ("rate", "high", "num_tasks", "sentence"),
    [
        (
            *(0.0, 0.0536, 56),
            "passed: Attacks of red succeed in 0.0 %, upper 95 % bound 5.4 %, level 10.0 %,"
            " 56 tasks",
        ),
        (
            *(0.125, 0.21, 56),
            "refused: Attacks of red succeed in 12.5 %, upper 95 % bound 21.0 %, level 10.0 %,"
            " 56 tasks",
        ),
        (
            *(0.0, 0.3, 10),
            "not enough data: Attacks of red succeed in 0.0 %, upper 95 % bound 30.0 %,"
            " level 10.0 %, 10 tasks; about 90 tasks would decide",
        ),
    ],
)
def test_attacks_are_held_to_a_level_whatever_the_served_policy_does(
    rate: float, high: float, num_tasks: int, sentence: str
) -> None:
    found = _difference(rate, 0.0, high, num_tasks)
    decision = decide_gate({"Attacks of red": found}, [ATTACKS], min_tasks=100)
    assert decision.sentence == sentence


def test_lost_attacks_decide_nothing() -> None:
    found = replace(_difference(0.0, 0.0, 0.05, 56), candidate_samples=SampleCounts(60, 56))
    decision = decide_gate({"Attacks of red": found}, [ATTACKS], min_tasks=100)
    assert decision.verdict is GateVerdict.NOT_ENOUGH_DATA


def test_a_bound_below_the_margin_asks_for_more_tasks() -> None:
    decision = _decide(_difference(-0.005, -0.035, 0.025, 120))
    assert decision.verdict is GateVerdict.NOT_ENOUGH_DATA
    assert decision.sentence == (
        "not enough data: success worse by 0.5 points, lower 95 % bound -3.5 points,"
        " margin -2.0 points, 120 tasks; about 480 tasks would decide"
    )


def test_equal_policies_are_called_equal() -> None:
    assert "success equal, lower" in _decide(_difference(0.0, -0.012, 0.012, 256)).sentence


def test_few_tasks_decide_nothing() -> None:
    decision = _decide(_difference(0.3, 0.2, 0.4, 12))
    assert decision.sentence == (
        "not enough data: success has 12 tasks of both policies, 100 are needed"
    )


def test_a_metric_without_a_comparison_decides_nothing() -> None:
    decision = decide_gate({}, [SUCCESS], min_tasks=1)
    assert decision.sentence == "not enough data: success was not measured"


def test_many_tasks_without_a_partner_decide_nothing() -> None:
    decision = _decide(replace(BETTER, num_unpaired=14))
    assert decision.sentence == (
        "not enough data: success lacks one policy's samples of 14 tasks beside 256 tasks of both"
    )


@pytest.mark.parametrize(
    ("candidate", "served", "sentence"),
    [
        ((1000, 980), (1000, 985), "passed: success better"),
        ((1000, 940), (1000, 985), "lacks 60 of 1,000 samples of the candidate"),
        ((1000, 1000), (1000, 940), "lacks 60 of 1,000 samples of the served policy"),
        (
            (1000, 970),
            (1000, 999),
            "lacks 30 of 1,000 samples of the candidate, clearly more than 1 of 1,000 of the"
            " served policy",
        ),
        ((1000, 999), (1000, 970), "passed: success better"),
    ],
)
def test_lost_samples_decide_nothing_where_they_may_hide_a_loss(
    candidate: tuple[int, int], served: tuple[int, int], sentence: str
) -> None:
    counted = replace(
        BETTER,
        candidate_samples=SampleCounts(*candidate),
        served_samples=SampleCounts(*served),
    )
    assert sentence in _decide(counted).sentence


def test_a_monitor_that_fires_refuses_whatever_the_figures() -> None:
    finding = "monitor edit-rate drift: edits per rollout fell by 31 %"
    decision = _decide(BETTER, SLOWER, finding)
    assert decision.sentence == f"refused: {finding}"


FIGURES = st.floats(-1, 1)


@given(
    figures=st.lists(st.tuples(FIGURES, FIGURES, FIGURES).map(sorted), min_size=1, max_size=3),
    tasks=st.integers(1, 300),
)
def test_only_bounds_above_every_margin_pass(figures: list[list[float]], tasks: int) -> None:
    comparisons = {
        f"m{n}": _difference(middle, low, high, tasks)
        for n, (low, middle, high) in enumerate(figures)
    }
    rules = [MarginRule(metric=name, margin=0.02) for name in comparisons]
    verdict = decide_gate(comparisons, rules, min_tasks=50).verdict
    holds = tasks >= 50 and all(each.low > -0.02 for each in comparisons.values())
    assert (verdict is GateVerdict.PASSED) is holds


@pytest.mark.parametrize(
    ("own", "verdict", "words"),
    [
        (BETTER, GateVerdict.PASSED, "lower 95 % bound 1.2 points, a gain is needed"),
        (_difference(0.03, -0.01, 0.07, 256), GateVerdict.NOT_ENOUGH_DATA, "would decide"),
        (_difference(0.0, 0.0, 0.0, 256), GateVerdict.REFUSED, "own equal, lower 95 % bound 0.0"),
        (_difference(-0.01, -0.03, 0.01, 256), GateVerdict.REFUSED, "own worse by 1.0 points"),
    ],
)
def test_a_branch_must_gain_on_its_own_tasks_and_may_lose_the_margin_on_others(
    own: PairedDifference, verdict: GateVerdict, words: str
) -> None:
    rules = [MarginRule(metric="own", margin=0), SUCCESS]
    within = _difference(-0.005, -0.015, 0.005, 256)
    decision = decide_gate({"own": own, "success": within}, rules, min_tasks=100)
    assert decision.verdict is verdict
    assert words in decision.sentence
    lost = _difference(-0.05, -0.08, -0.02, 256)
    decision = decide_gate({"own": own, "success": lost}, rules, min_tasks=100)
    assert decision.verdict is GateVerdict.REFUSED


def test_a_gate_without_rules_and_a_margin_below_nothing_are_mistakes() -> None:
    with pytest.raises(ValueError, match="without rules"):
        decide_gate({}, [], min_tasks=1)
    with pytest.raises(ValueError, match="margin of success"):
        MarginRule(metric="success", margin=-0.01)
