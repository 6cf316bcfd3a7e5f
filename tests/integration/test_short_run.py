"""A short run goes from manifest to trained policy on this machine, on a real vLLM engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import cut_demo

from etude.common.run_folder.record import FolderRecord

DEADLINE_S = 420
"""Seven times the 57 s that it took beside other tests on two cores."""


@pytest.mark.smoke
def test_a_short_run_trains_on_rollouts_of_the_engine_that_it_updates(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cut_demo.make_data({"folder": str(folder / "inputs" / "etude")}, tasks=16)
    manifest = tmp_path / "rlrun.yaml"
    manifest.write_text(json.dumps(cut_demo.short_demo()))  # JSON is YAML
    command = [sys.executable, "-c", "from etude.cli.main import main; main()", "run"]

    done = subprocess.run(
        [*command, str(manifest), "--dir", str(folder), "--plain"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(FolderRecord(folder).rows())
    steps = [row["step"] for row in rows if row["kind"] == "step" and "reward_mean" in row]
    assert steps == [1, 2, 3]
    assert any(row["kind"] == "eval" for row in rows)
    versions = [row for row in rows if row["kind"] == "version"]
    assert versions, "no version reached the engine"
