"""The summary of the SmolLM2 run: rollouts, rewards and versions as the run recorded them."""

import runpy
from pathlib import Path

import pytest

from etude.common.run_folder.record import FolderRecord

SUMMARY = Path(__file__).parents[3] / "examples" / "smollm2" / "summary.py"


def write_run(folder: Path) -> FolderRecord:
    record = FolderRecord(folder)
    step = {"kind": "step", "phase": "rl", "step": 1, "time_s": 60.0, "mismatch_mean": 3e-6}
    step |= {"reward_mean": 0.5, "success_mean": 0.25, "rollout_seconds": 30.0, "update_seconds": 9}
    version = {"kind": "version", "phase": "rl", "step": 1, "time_s": 120.0, "bytes": 123_456}
    record.append([step, version | {"swap_ms": 41.5}])
    turn = {"role": "assistant", "text": "\x1b[2Jdone"}
    rollouts = [
        {
            "task_id": f"t{place}",
            "reward": reward,
            "tokens": 9,
            "ending": "stopped",
            "turns": [turn],
        }
        for place, reward in enumerate((0.25, None, 1.0))
    ]
    record.write_rollouts(1, "train", rollouts)
    return record


def test_rollouts_are_printed_from_the_best_on_and_cannot_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(SUMMARY))["print_rollouts"](write_run(tmp_path), 2)
    printed = capsys.readouterr().out
    assert printed.index("t2: reward 1.0") < printed.index("t0: reward 0.25")
    assert "t1" not in printed
    assert "\x1b" not in printed
    assert "[2Jdone" in printed


def test_a_step_is_shown_with_the_version_that_came_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = list(write_run(tmp_path).rows())
    runpy.run_path(str(SUMMARY))["print_steps"](rows)
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:6] == ["1", "0.500", "0.250", "3.00e-06", "41.5", "123,456"]
