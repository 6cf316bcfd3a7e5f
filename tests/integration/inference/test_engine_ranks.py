"""One engine whose weights are spread over two real workers of vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.weights.parallel_engine import options_of

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def seen(
    request: pytest.FixtureRequest,
    make_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What the engine went through: five versions, one that a rank refuses, the same again."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model")
    program = [sys.executable, "-m", "tests.support.weights.parallel_engine", request.param]
    done = subprocess.run(
        [*program, str(model), str(folder / "scratch")],
        cwd=ROOT,
        env=os.environ | options_of(model).environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"kind": request.param}


def test_the_ranks_hold_every_version_bit_for_bit_between_them(seen: dict[str, Any]) -> None:
    labels = ["1.0", "1.1", "1.2", "1.3", "1.4", "1.4", "1.5"]
    assert seen["versions"] == [[label, True] for label in labels]


def test_a_version_that_one_rank_refuses_is_taken_back_on_both(seen: dict[str, Any]) -> None:
    assert "rank 1" in seen["refused"]


def test_what_tensor_parallel_ranks_sample_is_of_the_version(seen: dict[str, Any]) -> None:
    # vLLM's CPU build cannot compute with pipeline ranks: their bits alone are looked at.
    assert seen["sampled"] == {"tensor": 7, "pipeline": 0}[seen["kind"]]
