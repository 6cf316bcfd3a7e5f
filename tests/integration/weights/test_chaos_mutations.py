"""A run of the chain without one of the checks must fail: else it proves nothing with them."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.chaos.mutations import MUTATIONS

ROOT = Path(__file__).parents[3]


@pytest.mark.long
@pytest.mark.parametrize("check", MUTATIONS)
def test_a_chain_without_one_of_its_checks_is_noticed(check: str) -> None:
    command = [sys.executable, "-m", "tests.harness.chaos", "--mutation", check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
