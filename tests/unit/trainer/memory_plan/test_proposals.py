"""Proposed changes of a manifest, applied to it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from etude.common.api.lint.linter import lint_text
from etude.common.api.run.spec import RLRunSpec
from etude.common.api.yaml_documents import FieldPath
from etude.trainer.memory_plan.proposals import Fields, propose_changes

EXAMPLES = Path(__file__).parents[4] / "examples"
RUNS = {path: path.read_text() for path in sorted(EXAMPLES.glob("*/rlrun*.yaml"))}
AXIS = st.sampled_from([1, 2, 4])
TRAINER = ("roles", "trainer")


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """An example with other ranks, on other GPUs, with other settings of memory."""
    manifest: dict[str, Any] = yaml.safe_load(RUNS[draw(st.sampled_from(sorted(RUNS)))])
    trainer = manifest["spec"]["roles"]["trainer"]
    mesh = {name: draw(AXIS) for name in ("shard", "replicate", "context")}
    ranks = mesh["shard"] * mesh["replicate"] * mesh["context"]
    gpus = draw(st.sampled_from([0, ranks, 1, 2]))
    trainer |= {"learnerRanks": ranks, "gpusPerReplica": gpus}
    trainer |= draw(st.sampled_from([{}, {"packing": "Padded"}, {"cpuOffload": True}]))
    trainer.pop("mesh", None)
    if draw(st.booleans()):
        trainer["mesh"] = mesh | {"expert": draw(st.sampled_from([1, mesh["shard"]]))}
    if gpus not in {0, ranks}:
        manifest["spec"]["scheduling"] = {"workload": "RayCluster"}
    for phase in manifest["spec"]["phases"]:
        phase["optimizer"]["beta2"] = draw(st.sampled_from(["0.95", "0.999"]))
    assume(not lint_text(json.dumps(manifest), name="run"))
    return manifest


def set_field(spec: dict[str, Any], path: FieldPath, value: object) -> None:
    owner: Any = spec
    for part in path[:-1]:
        owner = owner[part] if isinstance(part, int) else owner.setdefault(part, {})
    owner[path[-1]] = value


@given(manifests())
def test_a_manifest_with_a_proposal_is_accepted(manifest: dict[str, Any]) -> None:
    spec = RLRunSpec.model_validate(manifest["spec"])
    for index in range(len(spec.phases)):
        for proposal in propose_changes(spec, index, longest=100):
            changed = copy.deepcopy(manifest)
            for path, value in proposal.fields.items():
                set_field(changed["spec"], path, value)
            assert lint_text(json.dumps(changed), name=proposal.text) == []
            assert RLRunSpec.model_validate(changed["spec"]) == proposal.spec != spec


def example(name: str, **trainer: object) -> RLRunSpec:
    spec = yaml.safe_load(RUNS[EXAMPLES / name / "rlrun.yaml"])["spec"]
    spec["roles"]["trainer"] |= trainer
    return RLRunSpec.model_validate(spec)


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (
            example("qwen2.5-7b"),
            {(*TRAINER, "learnerRanks"): 8, (*TRAINER, "gpusPerReplica"): 8},
        ),
        (
            example("qwen2.5-7b", learnerRanks=8, gpusPerReplica=8),
            {(*TRAINER, "learnerRanks"): 16, ("scheduling", "workload"): "RayCluster"},
        ),
        (
            example("qwen-32b"),
            {(*TRAINER, "learnerRanks"): 32, (*TRAINER, "mesh"): {"shard": 16, "context": 2}},
        ),
    ],
    ids=["one-pod", "second-pod", "mesh"],
)
def test_more_ranks_come_with_their_gpus_and_their_mesh(spec: RLRunSpec, fields: Fields) -> None:
    assert fields in [proposal.fields for proposal in propose_changes(spec, 0, longest=0)]


def test_ranks_without_gpus_share_a_pod_so_that_more_of_them_save_nothing() -> None:
    texts = [each.text for each in propose_changes(example("demo"), 0, longest=0)]
    assert texts
    assert not any("learnerRanks" in text for text in texts)
