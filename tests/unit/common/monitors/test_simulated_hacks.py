"""The two published hacks, learned by a simulated policy: who wins, and what fires first."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[4] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("monitors")


@pytest.mark.parametrize("act", ["BREAK", "ASK"])
def test_a_hack_wins_under_a_naive_reward_and_loses_under_the_rubric(bench: Any, act: str) -> None:
    hack = bench.Act[act]
    naive, rubric = (bench.learn(hack, reward, seed=0) for reward in ("naive", "rubric"))
    assert naive.share_after > 5 * naive.share_before
    assert rubric.share_after < rubric.share_before
    assert naive.is_caught_first
    assert naive.gained is not None
    assert rubric.gained is None


def test_an_honest_window_is_raised_by_nothing_and_a_hacked_one_by_its_monitor(bench: Any) -> None:
    assert bench.honest_findings(2, seed=0) == [set(), set()]
    assert bench.is_caught("MaskedShare", seed=0)
    assert bench.is_caught("HeldOutScore", seed=0)
