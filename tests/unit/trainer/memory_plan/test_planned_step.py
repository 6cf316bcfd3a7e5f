"""A planned step against a real one, and against arithmetic."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from etude.common.api.run.phases import Phase
from etude.common.api.run.roles import Lora
from etude.trainer.learner.gradients import backward_rows, reference_scorer
from etude.trainer.learner.objective import Objective, PolicyObjective, imitation_loss
from etude.trainer.learner.phase import PhaseManager
from etude.trainer.learner.sequence_packing import Packing
from etude.trainer.memory_plan.allocations import Kind, Peak
from etude.trainer.memory_plan.step import (
    PlannedStep,
    UnplannableModelError,
    build_row,
    plan_step,
)
from etude.trainer.model.activation_checkpointing import Checkpointing, checkpoint_blocks
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.policy import InvalidModelError, load_policy

SFT = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 1,
    "optimizer": {"learningRate": "1e-3"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
NARROW = {"learningRate": "1e-3", "moments": "BFloat16"}
RL = {
    "name": "rl",
    "type": "ReinforcementLearning",
    "maxSteps": 1,
    "optimizer": {"learningRate": "1e-3"},
    "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
    "algorithm": {"parameters": {"klCoefficient": 0.1}},
}


def step(phase: dict[str, Any] = SFT, **fields: Any) -> PlannedStep:
    given = {"tokens": 384, "packed": False, "on_gpu": False, **fields}
    return PlannedStep(phase=Phase.model_validate(phase), **given)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A model whose activations weigh about as much as its weights."""
    return save(
        tmp_path,
        LlamaConfig(
            vocab_size=2_048,
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=384,
            max_position_embeddings=1_024,
            tie_word_embeddings=False,
        ),
    )


def save(folder: Path, config: PretrainedConfig) -> Path:
    config.save_pretrained(folder)
    return folder


def measure_peak(run: Callable[[], object]) -> int:
    """Largest sum of live allocations during a call, by the allocator's own events."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    changes = [
        e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"
    ]
    return max(itertools.accumulate(changes), default=0)


def measure_step(folder: Path, planned: PlannedStep) -> int:
    """Bytes of a real step: what is there before it, and what it allocates beside that."""
    ranks = RankGroup(rank=0, size=1, device=torch.device("cpu"))
    policy = load_policy(folder, seed=0)
    checkpoint_blocks(policy.model, planned.checkpointing)
    manager = PhaseManager(policy, ranks)
    state = manager.begin(planned.phase, 0, under_way=None)
    state.optimiser.reset_moments(updates=1)
    kept = [*policy.parameters(), *state.optimiser.moments().values()]
    objective: Objective = imitation_loss
    if state.algorithm is not None and state.reference is not None:
        kept += [*state.reference.parameters()]
        scorer = reference_scorer(state.reference)
        objective = PolicyObjective(algorithm=state.algorithm, reference=scorer)

    def run() -> None:
        manager.copy_state("checkpoint", state, is_published=False)
        rows = [build_row(planned.tokens)] * 2
        packing = Packing(max_tokens=planned.tokens, packed=planned.packed)
        backward_rows(policy, rows, objective, ranks=ranks, packing=packing)
        state.optimiser.apply(step=0, loss=0.0)

    return sum(tensor.numel() * tensor.element_size() for tensor in kept) + measure_peak(run)


@pytest.mark.parametrize(
    "planned",
    [
        step(),
        step(packed=True, checkpointing=Checkpointing.BLOCKS),
        step(RL, checkpointing=Checkpointing.SELECTIVE),
        step(SFT | {"optimizer": NARROW}),
    ],
    ids=["plain", "packed", "with-reference", "narrow-moments"],
)
def test_a_plan_is_within_a_tenth_of_what_the_allocator_gives(
    planned: PlannedStep, dense: Path
) -> None:
    assert plan_step(dense, planned).num_bytes == pytest.approx(
        measure_step(dense, planned), rel=0.1
    )


def weights_of(folder: Path) -> int:
    return sum(4 * p.numel() for p in load_policy(folder, seed=0).parameters())


def test_shards_gradients_and_moments_are_fp32_and_divided_by_the_ranks(dense: Path) -> None:
    whole = weights_of(dense)
    for ranks in (2, 8):
        peak = plan_step(dense, step(shard=ranks, on_gpu=True, packed=True))
        share = pytest.approx(whole / ranks, rel=0.02)
        assert peak.by_kind[Kind.WEIGHTS] == share
        assert peak.by_kind[Kind.MOMENTS] == pytest.approx(2 * whole / ranks, rel=0.02)
        assert peak.by_kind[Kind.GRADIENTS] == share


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_alone_have_gradients_and_moments(ranks: int, dense: Path) -> None:
    peak = plan_step(dense, step(lora=Lora(rank=2), shard=ranks))
    assert peak.by_kind[Kind.WEIGHTS] > weights_of(dense) / ranks
    assert parts(peak, Kind.GRADIENTS, Kind.MOMENTS) < weights_of(dense) / 10


def test_copies_of_the_weights_save_no_memory(dense: Path) -> None:
    alone, copies = (
        plan_step(dense, step(shard=2, replicate=n, on_gpu=True, packed=True)) for n in (1, 2)
    )
    assert copies.by_kind[Kind.WEIGHTS] == alone.by_kind[Kind.WEIGHTS]


def test_ranks_that_share_rows_have_a_share_of_the_activations(dense: Path) -> None:
    planned = step(shard=4, on_gpu=True, packed=True, tokens=4_096)
    alone, shared = plan_step(dense, planned), plan_step(dense, replace(planned, context=2))
    assert shared.by_kind[Kind.WEIGHTS] == alone.by_kind[Kind.WEIGHTS]
    activations = shared.by_kind[Kind.ACTIVATIONS] / alone.by_kind[Kind.ACTIVATIONS]
    assert activations == pytest.approx(0.5, abs=0.1)


def parts(peak: Peak, *kinds: Kind) -> int:
    return sum(peak.by_kind.get(kind, 0) for kind in kinds)


def test_a_block_that_is_checkpointed_keeps_its_input_alone(dense: Path) -> None:
    planned = step(shard=2, on_gpu=True, packed=True, tokens=4_096)
    everything = plan_step(dense, planned)
    inputs = plan_step(dense, replace(planned, checkpointing=Checkpointing.BLOCKS))
    # Three inputs of [4096, 128] in bf16, and what the final norm and the head keep.
    assert parts(inputs, Kind.ACTIVATIONS) < parts(everything, Kind.ACTIVATIONS) / 2
    assert inputs.num_bytes < everything.num_bytes


def test_offloaded_shards_leave_the_gpu(dense: Path) -> None:
    planned = step(shard=2, on_gpu=True, packed=True)
    on_gpu, on_host = plan_step(dense, planned), plan_step(dense, replace(planned, offload=True))
    assert parts(on_host, Kind.WEIGHTS, Kind.GRADIENTS, Kind.MOMENTS) == 0
    assert on_host.num_bytes < on_gpu.num_bytes
    # Weights, gradients and both moments, and the copy that a checkpoint is stored from.
    assert on_host.num_elsewhere == pytest.approx(7 * weights_of(dense) / 2, rel=0.02)


@pytest.mark.parametrize(
    ("phase", "copies"), [(RL, 4), (SFT | {"optimizer": NARROW}, 2)], ids=["reference", "narrow"]
)
def test_the_copy_of_a_checkpoint_is_on_the_host(
    phase: dict[str, Any], copies: int, dense: Path
) -> None:
    peak = plan_step(dense, step(phase, shard=2, on_gpu=True, packed=True))
    assert Kind.CHECKPOINT not in peak.by_kind
    assert peak.num_elsewhere == pytest.approx(copies * weights_of(dense) / 2, rel=0.02)


def test_the_copy_of_a_checkpoint_is_beside_a_step_on_a_cpu(dense: Path) -> None:
    peak = plan_step(dense, step())
    assert peak.by_kind[Kind.CHECKPOINT] == pytest.approx(3 * weights_of(dense), rel=0.02)
    assert peak.num_elsewhere == 0


def test_a_mixture_of_experts_is_planned_with_all_its_experts(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=512,
    )
    folder = save(tmp_path, config)
    planned = step(shard=4, on_gpu=True, packed=True)
    whole, divided = (plan_step(folder, replace(planned, expert=ranks)) for ranks in (1, 4))
    for peak in (whole, divided):
        assert peak.by_kind[Kind.WEIGHTS] == pytest.approx(weights_of(folder) / 4, rel=0.02)
    # A rank gathers its own experts alone.
    gathered = [parts(peak, Kind.GATHERED, Kind.TEMPORARIES) for peak in (whole, divided)]
    assert gathered[1] < 0.9 * gathered[0]


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"holds no config\.json"):
        plan_step(tmp_path, step())


def test_a_step_that_depends_on_values_is_refused_by_name(dense: Path) -> None:
    text = (dense / "config.json").read_text()
    scaling = '"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}'
    start = text.index('"rope_parameters"')
    end = text.index("}", start) + 1
    (dense / "config.json").write_text(text[:start] + scaling + text[end:])
    with pytest.raises(UnplannableModelError, match="memory cannot be planned"):
        plan_step(dense, step())
