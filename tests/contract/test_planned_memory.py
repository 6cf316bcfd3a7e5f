"""The examples' models on GPUs of 80 GB, planned by the learner's own step."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.common.api.run.spec import RLRunSpec
from etude.trainer.memory_plan.phases import plan_phases

pytestmark = pytest.mark.long  # a minute of a core each

ROOT = Path(__file__).parents[2]
LIMIT = 0.9 * 80
"""GiB of a GPU for tensors: `etude plan` leaves a tenth."""


@pytest.mark.parametrize(
    ("example", "model", "trainer"),
    [
        ("qwen2.5-7b", "qwen2.5-7b", {}),
        (
            "qwen2.5-7b",
            "qwen2.5-7b",
            {
                "learnerRanks": 8,
                "gpusPerReplica": 8,
                "mesh": {"shard": 4, "context": 2},
                "microBatchTokens": 131_072,
            },
        ),
        ("qwen-32b", "qwen3-32b", {}),
        ("qwen3-30b-a3b", "qwen3-30b-a3b", {}),
    ],
    ids=["7b", "7b-128k", "32b", "30b-a3b"],
)
def test_an_example_fits_into_the_memory_of_its_gpus(
    example: str, model: str, trainer: dict[str, Any], tmp_path: Path
) -> None:
    shape = ROOT / "tests" / "data" / "model-configs" / f"{model}.json"
    (tmp_path / "config.json").write_bytes(shape.read_bytes())
    given = yaml.safe_load((ROOT / "examples" / example / "rlrun.yaml").read_text())["spec"]
    given["roles"]["trainer"].update(trainer)
    spec = RLRunSpec.model_validate(given)
    (phase,) = plan_phases(spec, tmp_path, limit_bytes=float("inf"))
    assert phase.peak.num_bytes / (1 << 30) < LIMIT
