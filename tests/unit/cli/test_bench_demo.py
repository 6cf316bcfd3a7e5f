"""The demo's bench shows the figures of the run it made, or none; others say that they need it."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench" / "demo.py"


def test_a_demo_that_fails_is_not_answered_by_older_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo.json").write_text("{}")
    failed = subprocess.CompletedProcess[bytes]([], 8)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(sys, "argv", [str(BENCH), "--run", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH), run_name="__main__")
    assert ended.value.code == 8


def test_a_figure_that_was_nought_before_is_no_mistake() -> None:
    figures = dict.fromkeys(("held_out_after", "greedy_after", "reward_last"), 1.0)
    figures |= dict.fromkeys(("held_out_before", "greedy_before", "reward_first"), 0.0)
    found = runpy.run_path(str(BENCH))["ratios"]({**figures, "first_step_s": 1.0, "total_s": 1.0})
    assert found["held-out T=1, after / before"] == float("inf")


def test_a_bench_that_replays_a_run_says_how_to_make_one(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH.with_name("in_flight.py")), "--run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path} has 0 versions" in done.stderr
    assert "python bench/demo.py" in done.stderr
    assert len(done.stderr.splitlines()) == 1
