"""Runs in examples/ are what the API takes, and their numbers of GPUs are what their text says."""

from pathlib import Path

import pytest
import yaml

from etude.common.api.kinds import RLRun
from etude.common.api.lint.linter import lint_text
from etude.common.hub_uri import is_hub_uri, parse_hub_uri
from etude.operator import names
from etude.operator.builders.run_spec import pods_by_role

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = sorted(EXAMPLES.glob("*/rlrun*.yaml"))
GPUS = {"qwen2.5-7b": 8, "qwen-32b": 24, "qwen3-30b-a3b": 24}


def read_run(path: Path) -> RLRun:
    manifest = yaml.safe_load(path.read_text())
    manifest["metadata"] |= {"uid": "u", "namespace": "lab"}
    return RLRun.model_validate(manifest)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_example_has_nothing_to_fix(path: Path) -> None:
    assert lint_text(path.read_text(), name=path.parent.name) == []


@pytest.mark.parametrize("name", GPUS)
def test_a_large_example_takes_the_gpus_that_its_first_line_names(name: str) -> None:
    run = read_run(EXAMPLES / name / "rlrun.yaml")
    pods = pods_by_role(run)
    trainer, inference = run.spec.roles.trainer, run.spec.roles.inference
    assert inference is not None
    taken = (
        pods[names.TRAINER] * trainer.gpus_per_replica
        + pods[names.INFERENCE] * inference.gpus_per_replica
    )
    assert taken == GPUS[name]
    assert trainer.learner_ranks == pods[names.TRAINER] * trainer.gpus_per_replica
    assert is_hub_uri(run.spec.model.folder)
    assert parse_hub_uri(run.spec.model.folder).revision == "main"
    (phase,) = run.spec.phases
    assert phase.rollout is not None
    assert phase.rollout.max_tokens <= trainer.micro_batch_tokens
