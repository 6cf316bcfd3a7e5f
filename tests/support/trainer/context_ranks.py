"""Four ranks that compare steps of shared rows with the step of one rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from etude.trainer.learner.gradients import accumulate_gradients, microbatch_losses
from etude.trainer.learner.routes.recording import RouteRecording
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import Microbatch, Packing
from etude.trainer.model.activation_checkpointing import Checkpointing, checkpoint_blocks
from etude.trainer.model.fsdp import RankGroup, join_ranks, leave_ranks
from etude.trainer.model.mesh import build_context_group
from etude.trainer.model.output_head import TokenScores
from etude.trainer.model.policy import Policy, copy_frozen, load_policy

LAYERS = 2
RANKS = 4
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
REPLAYED = "replayed experts"
CASES: dict[str, tuple[PretrainedConfig, int]] = {
    "two of four ranks": (LlamaConfig(**SMALL), 2),
    "repeated key heads": (LlamaConfig(**SMALL), 4),
    "windows and caps": (Gemma2Config(**SMALL, **WINDOWS, attn_logit_softcapping=1.0), 2),
    "experts": (Qwen3MoeConfig(**SMALL, **EXPERTS), 2),
    REPLAYED: (Qwen3MoeConfig(**SMALL, **EXPERTS), 2),
}


class Recorder:
    """Cross-entropy that keeps the log-prob of each token under its weight."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.logprobs: list[Tensor] = []

    def __call__(self, scores: TokenScores, microbatch: Microbatch) -> Tensor:
        self.weights.append(microbatch.weights)
        self.logprobs.append(scores.logprobs.detach())
        return -(microbatch.weights * scores.logprobs).sum()

    def ordered(self, ranks: RankGroup) -> Tensor:
        """Log-probs of all ranks in the order of the weights, which are all different."""
        weights, logprobs = (
            ranks.gather_rows(torch.cat(parts)) for parts in (self.weights, self.logprobs)
        )
        return logprobs[weights.argsort()]


def batch(*, has_routes: bool = False) -> list[TrainingRow]:
    """Rows of several microbatches, one of which is shorter than the ranks need to share it."""
    return [add_routes(row) for row in plain_batch()] if has_routes else plain_batch()


def add_routes(row: TrainingRow) -> TrainingRow:
    """Give each token two experts by its place."""
    first = (np.arange(row.token_ids.size)[:, None] + np.arange(LAYERS)) % 4
    return replace(row, routes=np.stack([first, (first + 1) % 4], -1).astype(np.uint8))


def plain_batch() -> list[TrainingRow]:
    """Rows without recorded experts."""
    rng = np.random.default_rng(0)
    made = []
    for length in (17, 9, 40, 2, 25, 31, 3):
        places = np.flatnonzero(rng.random(length - 1) < 0.7) + 1
        made.append(
            TrainingRow(
                token_ids=rng.integers(0, 64, length).astype(np.int32),
                places=places,
                weights=rng.random(places.size, dtype=np.float32) * np.float32(0.02),
            )
        )
    return made


def step(
    policy: Policy, ranks: RankGroup, *, packed: bool, has_routes: bool = False
) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, complete gradients and log-probs of a step."""
    recorder = Recorder()
    packing = Packing(max_tokens=60, packed=packed)
    rows = batch(has_routes=has_routes)
    loss = accumulate_gradients(policy, rows, recorder, ranks=ranks, packing=packing)
    grads = {}
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        grads[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return loss, grads, recorder.ordered(ranks)


@torch.no_grad()
def score(policy: Policy, ranks: RankGroup, *, has_routes: bool) -> Tensor:
    """Log-probs of a pass without gradient."""
    recorder = Recorder()
    packing = Packing(max_tokens=60, packed=True)
    rows = batch(has_routes=has_routes)
    for _ in microbatch_losses(policy, rows, recorder, ranks=ranks, packing=packing):
        pass
    return recorder.ordered(ranks)


@torch.no_grad()
def record(policy: Policy, ranks: RankGroup, *, packed: bool) -> list[Any]:
    """Experts that the routers choose for the tokens of each row."""
    if policy.routers.shape is None:
        return []
    rows = [replace(row, number=number) for number, row in enumerate(batch())]
    recording = RouteRecording(policy)

    def add(scores: TokenScores, microbatch: Microbatch) -> Tensor:
        recording.add(microbatch)
        return scores.logprobs.sum()

    packing = Packing(max_tokens=60, packed=packed)
    with recording.open():
        for _ in microbatch_losses(policy, rows, add, ranks=ranks, packing=packing):
            pass
    parts = [[row.routes for row in recording.finish(rows)]] * ranks.size
    if ranks.size > 1:
        dist.all_gather_object(parts, parts[0])
    # What a rank does not compute has the largest value.
    return [
        np.minimum.reduce([routes for routes in each if routes is not None])
        for each in zip(*parts, strict=True)
    ]


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to values above 1: fp32 has 24 bits of each."""
    return float(((found - expected).abs() / expected.abs().clamp(min=1)).max())


def count_collectives(policy: Policy, ranks: RankGroup) -> dict[str, int]:
    """Collectives of one forward and backward pass."""
    packing = Packing(max_tokens=1_000, packed=True)
    with CommDebugMode() as collectives:
        accumulate_gradients(policy, batch(), Recorder(), ranks=ranks, packing=packing)
    return {str(name): count for name, count in collectives.get_comm_counts().items()}


def compare(
    folder: Path, ranks: RankGroup, config: PretrainedConfig, size: int, *, has_routes: bool
) -> dict[str, Any]:
    """Largest differences from one rank with padded rows, and the collectives of a step."""
    config.save_pretrained(folder)
    alone = RankGroup(rank=0, size=1, device=ranks.device)
    whole = load_policy(folder, seed=1)
    if getattr(config, "attn_logit_softcapping", None):
        whole.model.set_attn_implementation("eager")  # SDPA has no caps
    expected = step(whole, alone, packed=False, has_routes=has_routes)
    chosen = record(whole, alone, packed=False)
    ranks = replace(ranks, context=build_context_group("cpu", size=size))
    policy = load_policy(folder, seed=1, ranks=ranks)
    frozen = copy_frozen(policy, ranks)
    assert isinstance(frozen, Policy)
    recorded = record(policy, ranks, packed=True)
    loss, grads, logprobs = step(policy, ranks, packed=True, has_routes=has_routes)
    counts = count_collectives(policy, ranks)
    checkpoint_blocks(policy.model, Checkpointing.SELECTIVE)
    recomputed = step(policy, ranks, packed=True, has_routes=has_routes)[1]
    frozen_logprobs = score(frozen, ranks, has_routes=has_routes)
    return {
        "loss": abs(loss - expected[0]),
        "frozen copy": relative_difference(frozen_logprobs, expected[2]),
        "gradients": max(float((grads[name] - g).abs().max()) for name, g in expected[1].items()),
        "recomputed": max(float((recomputed[name] - g).abs().max()) for name, g in grads.items()),
        "logprobs": relative_difference(logprobs, expected[2]),
        "largest gradient": max(float(g.abs().max()) for g in expected[1].values()),
        "collectives": counts,
        "other experts": sum(
            int((np.sort(ours, -1) != np.sort(theirs, -1)).sum())
            for ours, theirs in zip(recorded, chosen, strict=True)
        ),
    }


def compare_all(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    """The comparisons of all cases, on one of RANKS ranks."""
    ranks = join_ranks(rank=rank, size=RANKS, rendezvous=f"file://{folder}/meet")
    found = {
        name: compare(folder / f"{name}-{rank}", ranks, config, size, has_routes=name == REPLAYED)
        for name, (config, size) in CASES.items()
    }
    leave_ranks(ranks)
    return found
