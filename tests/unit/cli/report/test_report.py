"""The report of a run."""

from pathlib import Path

from etude.cli.verbs.report import write_report
from etude.common.run_folder.record import FolderRecord

HOSTILE = "<script>alert(1)</script>"


def test_a_run_is_drawn_and_its_rollouts_are_escaped(tmp_path: Path) -> None:
    record = FolderRecord(tmp_path)
    record.append(
        [
            {
                "kind": "step",
                "phase": "sft",
                "step": 1,
                "time_s": 1.0,
                "loss": 2.0,
                "mtp_agreement": 0.5,
            },
            {
                "kind": "step",
                "phase": "rl",
                "step": 1,
                "time_s": 2.0,
                "reward_mean": 0.5,
                "rollouts": 8,
                "masked": 0,
                "tools": {"read_file": 3},
                "calls_per_turn": 1.5,
                "edit_rate": 0.25,
                "call_tokens": 12,
            },
            {"kind": "eval", "phase": "rl", "step": 1, "time_s": 3.0, "success": 0.5},
        ]
    )
    turns = [{"role": "assistant", "text": HOSTILE}]
    record.write_rollouts(1, "train", [{"task_id": HOSTILE, "reward": 1.0, "turns": turns}])

    page = write_report(tmp_path)

    text = page.read_text()
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text
    assert (tmp_path / "report" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report" / "mtp.png").exists()
    for name in ("looks", "edits", "tokens"):
        assert f"{name}.png" in text
        assert (tmp_path / "report" / f"{name}.png").exists()
    assert "read_file" in text


def test_a_run_without_rows_still_has_a_page(tmp_path: Path) -> None:
    assert "Nothing was recorded yet" in write_report(tmp_path).read_text()
