"""The demo's verdict on its own record."""

import pytest

from etude.cli.demo.result import DemoResult, IncompleteRecordError, measure_demo
from etude.cli.demo.stopwatch import DemoSession, Stopwatch

TIMES = Stopwatch((DemoSession(100.0, 265.0),))


def habits(malformed, edit_errors, read_first, tests_after):
    """What the trainer writes about the rollouts of one evaluation."""
    return {
        "sampled": {"malformed_per_rollout": malformed},
        "greedy": {
            "edit_error_rate": edit_errors,
            "read_before_edit": read_first,
            "tests_after_edit": tests_after,
        },
    }


def rows(
    *,
    sampled=(0.35, 0.85),
    greedy=(0.45, 0.97),
    rewards=(0.3, 0.75),
    before=(0.02, 0.4, 0.53, 0.0),
    after=(0.03, 0.2, 1.0, 0.98),
):
    """A short record: two supervised steps, twenty RL steps, two evaluations."""
    return [
        {"kind": "step", "phase": "sft", "step": 1, "time_s": 110.0, "loss": 2.0},
        {"kind": "step", "phase": "sft", "step": 2, "time_s": 200.0, "loss": 1.0},
        {"kind": "version", "time_s": 201.0, "epoch": 1, "number": 1},
        {
            "kind": "eval",
            "time_s": 220.0,
            "success": sampled[0],
            "greedy_success": greedy[0],
            "behaviour": habits(*before),
        },
        *(
            {
                "kind": "step",
                "phase": "rl",
                "step": step,
                "time_s": 230.0 + step,
                "reward_mean": rewards[step > 5],
                "rollouts": 8,
            }
            for step in range(1, 21)
        ),
        {
            "kind": "eval",
            "time_s": 260.0,
            "success": sampled[1],
            "greedy_success": greedy[1],
            "behaviour": habits(*after),
        },
    ]


def judged(**changes) -> DemoResult:
    return measure_demo(rows(**changes), times=TIMES, lost=0, peak_rss_gib=4.25)


def test_a_good_run_meets_every_target_and_says_so_in_one_line() -> None:
    result = judged()
    assert result.misses() == []
    assert result.summary() == (
        "demo: held-out T=1 0.35 -> 0.85, greedy 0.45 -> 0.97 | first optimiser step 10 s"
        " | RL 60 s | total 165 s | versions 1 | rollouts 160, lost 0 | peak RSS 4.2 GiB"
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"sampled": (0.35, 0.71)}, "held-out T=1 at the end: 0.71, below 0.72"),
        ({"sampled": (0.45, 0.75)}, "held-out T=1 rose by 0.30"),
        ({"sampled": (0.24, 0.85)}, "held-out T=1 after the warm-up: 0.24, below"),
        ({"sampled": (0.46, 0.95)}, "held-out T=1 after the warm-up: 0.46, above"),
        ({"greedy": (0.45, 0.87)}, "held-out greedy at the end: 0.87"),
        ({"greedy": (0.65, 1.00)}, "held-out greedy after the warm-up: 0.65, above"),
        ({"greedy": (0.29, 0.97)}, "held-out greedy after the warm-up: 0.29, below"),
        ({"rewards": (0.3, 0.71)}, "training reward of the last ten steps: 0.71"),
        ({"rewards": (0.52, 0.75)}, "less than 1.5 times as much"),
        ({"before": (0.11, 0.4, 0.53, 0.0)}, "malformed calls a rollout after the warm-up: 0.11"),
        ({"before": (0.02, 0.51, 0.53, 0.0)}, "edits refused after the warm-up (greedy): 0.51"),
        ({"after": (0.03, 0.2, 0.94, 0.98)}, "first edit after reading that file (greedy): 0.94"),
        ({"after": (0.03, 0.2, 1.0, 0.89)}, "tests run after the last edit (greedy): 0.89"),
    ],
)
def test_a_missed_target_is_named(changes, complaint: str) -> None:
    assert any(complaint in miss for miss in judged(**changes).misses())


def test_a_lost_rollout_fails_the_demo() -> None:
    result = measure_demo(rows(), times=TIMES, lost=1, peak_rss_gib=4.0)
    assert result.misses() == ["1 rollouts are unaccounted for"]


def test_a_slow_machine_is_named_and_no_failure() -> None:
    times = Stopwatch((DemoSession(-300.0, 400.0),))
    result = measure_demo(rows(), times=times, lost=0, peak_rss_gib=4.0)
    assert result.misses() == []
    assert result.delays() == [
        "first optimiser step 410 s, more than 120",
        "total 700 s, more than 600",
    ]
    assert judged().delays() == []


@pytest.mark.parametrize("cut", [slice(0, 3), slice(0, -1)])
def test_a_run_without_evaluations_cannot_be_judged(cut: slice) -> None:
    with pytest.raises(
        IncompleteRecordError, match="no evaluation, sampled and greedy, at both ends"
    ):
        measure_demo(rows()[cut], times=TIMES, lost=0, peak_rss_gib=0)


def test_a_run_that_was_never_evaluated_greedily_cannot_be_judged() -> None:
    record = [{**row, "greedy_success": None} for row in rows()]
    with pytest.raises(IncompleteRecordError):
        measure_demo(record, times=TIMES, lost=0, peak_rss_gib=0)
