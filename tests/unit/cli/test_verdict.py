"""The demo's verdict on its own record."""

import pytest

from etude.cli.demo.verdict import Outcome, outcome


def rows(*, sampled=(0.35, 0.85), greedy=(0.45, 0.97)):
    """A short record: two supervised steps, two RL steps, two evaluations."""
    return [
        {"kind": "step", "phase": "sft", "step": 1, "time_s": 110.0, "loss": 2.0},
        {"kind": "step", "phase": "sft", "step": 2, "time_s": 200.0, "loss": 1.0},
        {"kind": "version", "time_s": 201.0, "epoch": 1, "number": 1},
        {"kind": "eval", "time_s": 220.0, "success": sampled[0], "greedy_success": greedy[0]},
        {
            "kind": "step",
            "phase": "rl",
            "step": 1,
            "time_s": 230.0,
            "reward_mean": 0.3,
            "rollouts": 8,
        },
        {
            "kind": "step",
            "phase": "rl",
            "step": 2,
            "time_s": 240.0,
            "reward_mean": 0.6,
            "rollouts": 8,
        },
        {"kind": "eval", "time_s": 260.0, "success": sampled[1], "greedy_success": greedy[1]},
    ]


def judged(**changes) -> Outcome:
    return outcome(rows(**changes), started_s=100.0, ended_s=265.0, lost=0, peak_rss_gib=4.25)


def test_a_good_run_meets_every_target_and_says_so_in_one_line() -> None:
    result = judged()
    assert result.misses() == []
    assert result.line() == (
        "demo: held-out T=1 0.35 -> 0.85, greedy 0.45 -> 0.97 | first optimiser step 10 s"
        " | RL 60 s | total 165 s | versions 1 | rollouts 16, lost 0 | peak RSS 4.2 GiB"
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sampled": (0.35, 0.71)}, "held-out T=1 ended at 0.71"),
        ({"sampled": (0.45, 0.75)}, "held-out T=1 rose by 0.30"),
        ({"greedy": (0.45, 0.87)}, "held-out greedy ended at 0.87"),
        ({"greedy": (0.65, 1.00)}, "greedy started at 0.65"),
    ],
)
def test_a_missed_target_is_named(changes, complaint: str) -> None:
    assert any(complaint in miss for miss in judged(**changes).misses())


def test_a_lost_rollout_fails_the_demo() -> None:
    result = outcome(rows(), started_s=100.0, ended_s=265.0, lost=1, peak_rss_gib=4.0)
    assert result.misses() == ["1 rollouts are unaccounted for"]


def test_a_run_without_evaluations_cannot_be_judged() -> None:
    with pytest.raises(ValueError, match="no evaluation before and after"):
        outcome(rows()[:3], started_s=0, ended_s=1, lost=0, peak_rss_gib=0)
