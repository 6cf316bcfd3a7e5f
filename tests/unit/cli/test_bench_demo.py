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


def test_cpu_time_is_told_by_role_and_phase() -> None:
    def measurement(time_s: float, total: float, **roles: float) -> dict[str, object]:
        used = {role: {"cpu_s": seconds} for role, seconds in roles.items()}
        return {"time_s": time_s, "total": {"cpu_s": total}, "roles": used}

    steps = [
        {"kind": "step", "time_s": 10.0, "phase": "sft"},
        {"kind": "step", "time_s": 20.0, "phase": "sft"},
        {"kind": "step", "time_s": 30.0, "phase": "rl"},
    ]
    found = runpy.run_path(str(BENCH))["cpu_by_phase"](
        steps,
        [
            measurement(0, 0),
            measurement(9, 5, trainer=4),
            measurement(19, 12, trainer=10),
            measurement(29, 22, trainer=3, node=2),  # the trainer was restarted
        ],
    )
    assert found == {
        "start": {"trainer": 4, "other": 1},
        "sft": {"trainer": 6, "other": 1},
        "rl": {"trainer": 3, "node": 2, "other": 5},
    }
