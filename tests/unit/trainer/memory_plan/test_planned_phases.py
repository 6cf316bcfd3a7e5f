"""The memory of each phase of a manifest, and what would lower it."""

import json
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.run.spec import RLRunSpec
from etude.trainer.memory_plan.phases import describe_step, plan_phases
from etude.trainer.model.policy import read_config

GIB = 1 << 30
SMALL = {
    "model_type": "llama",
    "vocab_size": 2_048,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 1_024,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def spec(*phases: dict[str, Any], **trainer: Any) -> RLRunSpec:
    given = [
        {
            "name": f"phase-{index}",
            "type": "SupervisedFineTuning",
            "maxSteps": 1,
            "optimizer": {"learningRate": "1e-3"},
            "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
            **phase,
        }
        for index, phase in enumerate(phases)
    ]
    return RLRunSpec.model_validate(
        {
            "model": {"uri": "file:///model"},
            "storage": {"uri": "file:///run"},
            "phases": given,
            "roles": {"trainer": {"microBatchTokens": 512, **trainer}},
        }
    )


def test_changes_are_offered_where_a_phase_is_above_its_limit(folder: Path) -> None:
    run = spec({}, gpusPerReplica=2, learnerRanks=2)
    (fits,) = plan_phases(run, folder, limit_bytes=GIB)
    assert fits.changes == ()
    (memory,) = plan_phases(run, folder, limit_bytes=1)
    assert {change.proposal.text for change in memory.changes} == {
        "roles.trainer.activationCheckpointing: Blocks",
        "phases[0].optimizer.moments: BFloat16",
        "roles.trainer.cpuOffload: true",
        "roles.trainer.learnerRanks: 4, roles.trainer.gpusPerReplica: 4",
        "roles.trainer.mesh: {shard: 1, context: 2}",
    }
    sizes = [change.peak.num_bytes for change in memory.changes]
    assert sizes == sorted(sizes)
    assert sizes[-1] < memory.peak.num_bytes == fits.peak.num_bytes
    best = memory.changes[0]
    (changed,) = plan_phases(best.proposal.spec, folder, limit_bytes=GIB)
    assert changed.peak == best.peak


@pytest.mark.parametrize(
    ("phase", "tokens"),
    [
        ({}, 512),
        ({"batchTokens": 4_096}, 1_024),
        ({"batchTokens": 4_096, "sequenceTokens": 700}, 700),
        ({"batchTokens": 256}, 512),
        ({"batchTokens": 4_096, "contextExtension": {"positions": 2_048}}, 2_048),
    ],
)
def test_the_longest_pass_is_a_full_one_or_one_sequence(
    phase: dict[str, Any], tokens: int, folder: Path
) -> None:
    run = spec(phase)
    step = describe_step(run.roles.trainer, run.phases[0], read_config(folder))
    assert step.tokens == tokens
    assert not step.on_gpu


def test_later_phases_have_the_positions_of_earlier_ones(folder: Path) -> None:
    longer = {"batchTokens": 4_096, "contextExtension": {"positions": 2_048}}
    run = spec(longer, {"batchTokens": 4_096})
    planned = plan_phases(run, folder, limit_bytes=GIB)
    assert [memory.step.tokens for memory in planned] == [2_048, 2_048]
