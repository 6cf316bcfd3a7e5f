"""Scripted agents of three skills are ranked rightly, by every metric and by the gate."""

import pytest
from tests.support import session_agents

from etude.common.evaluation.comparison import PairedDifference, compare_by_task
from etude.common.evaluation.gate import GateVerdict, MarginRule, decide_gate
from etude.common.evaluation.quality import compare_change
from etude.common.evaluation.rollout_metrics import edits_without_evidence
from etude.common.evaluation.scores import best_of_k, mean_at_n
from etude.demo.sessions.tasks import SessionSource

NUM_TASKS = 20
NUM_SAMPLES = 2
Scores = dict[str, dict[str, dict[str, list[float]]]]
"""By agent, metric and task."""


@pytest.fixture(scope="module")
def scores() -> Scores:
    found: Scores = {name: {} for name in session_agents.SCRIPTS}
    for number, task in enumerate(SessionSource(5).take("held-out", NUM_TASKS)):
        before, reference = task.workspace(), task.workspace() | task.reference
        for name, metrics in found.items():
            for sample in range(NUM_SAMPLES):
                work = session_agents.work(name, task, NUM_SAMPLES * number + sample)
                quality = compare_change(before, work.files, reference)
                figures = {
                    "success": float(task.is_solved_by(work.files)),
                    "quality": quality.lines,
                    "unseen": float(edits_without_evidence(work.calls)),
                }
                for metric, value in figures.items():
                    metrics.setdefault(metric, {}).setdefault(f"{number}", []).append(value)
    return found


def _difference(scores: Scores, first: str, second: str, metric: str) -> PairedDifference:
    return compare_by_task(scores[first][metric], scores[second][metric], largest_change=1.0)


def test_success_ranks_them_by_skill(scores: Scores) -> None:
    means = [mean_at_n(scores[name]["success"]) for name in ("careful", "hurried", "patching")]
    assert means[0] == 1.0
    assert 0.3 < means[1] < 0.9
    assert means[2] == 0.0
    assert _difference(scores, "careful", "hurried", "success").low > 0
    assert _difference(scores, "hurried", "patching", "success").low > 0


def test_two_attempts_of_an_unsteady_agent_are_better_than_one(scores: Scores) -> None:
    hurried = scores["hurried"]["success"]
    assert best_of_k(hurried, k=2) > mean_at_n(hurried)


def test_quality_ranks_them_by_skill(scores: Scores) -> None:
    assert mean_at_n(scores["careful"]["quality"]) == 1.0
    assert _difference(scores, "careful", "hurried", "quality").low > 0
    assert _difference(scores, "hurried", "patching", "quality").low > 0.3


def test_only_edits_of_the_hurried_agent_lack_evidence(scores: Scores) -> None:
    assert mean_at_n(scores["careful"]["unseen"]) == 0.0
    assert mean_at_n(scores["patching"]["unseen"]) == 0.0
    assert mean_at_n(scores["hurried"]["unseen"]) > 7


@pytest.mark.parametrize(
    ("candidate", "served", "verdict"),
    [
        ("careful", "hurried", GateVerdict.PASSED),
        ("hurried", "careful", GateVerdict.REFUSED),
        ("patching", "careful", GateVerdict.REFUSED),
    ],
)
def test_the_gate_lets_better_agents_pass_and_no_worse_ones(
    candidate: str, served: str, verdict: GateVerdict, scores: Scores
) -> None:
    rules = [MarginRule(metric=name, margin=0.02) for name in ("success", "quality")]
    differences = {
        rule.metric: _difference(scores, candidate, served, rule.metric) for rule in rules
    }
    assert decide_gate(differences, rules, min_tasks=NUM_TASKS).verdict is verdict
