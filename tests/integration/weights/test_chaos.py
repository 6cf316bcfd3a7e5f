"""The chain of versions with every kind of fault at once: small here, long in the long tests."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
KINDS = {
    "kill publisher",
    "kill keeper",
    "kill replica",
    "kill rank",
    "zombie publisher",
    "zombie keeper",
    "overtaken reader",
    "late joiner",
    "flip at rest",
    "wrong delta",
    "store stopped",
    "old announce",
    "roll-back",
    "replica stopped for long",
    "rank fails in prepare",
    "rank fails in commit",
    "rank fails in undo",
}


def chain(tmp_path: Path, *options: str) -> dict[str, Any]:
    """What a run came to; a run that fails shows what it said."""
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.harness.chaos", "--quick", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


@pytest.mark.long
@pytest.mark.parametrize("store", ["folder"])
def test_through_every_fault_each_replica_serves_only_what_was_published(
    tmp_path: Path, store: str
) -> None:
    figures = chain(tmp_path, "--store", store)
    assert figures["versions"] >= 60
    assert (figures["wrong_bits"], figures["wrong_version_served"]) == (0, 0)
    assert figures["unrecovered"] == 0
    [run] = figures["stores"]
    assert run["failures"] == []
    assert set(run["injected"]) >= KINDS, "a kind of fault was never tried"
    assert run["states_served"] >= 60, "the servers have hardly looked"
