"""Ranks that divide experts, compared with one rank that has all of them."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import debug
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from etude.common.api.run.roles import Lora
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.routed_experts import ExpertIds
from etude.common.weights import VersionId
from etude.trainer.export.receipts import PublishBase, build_manifest
from etude.trainer.learner.batches import (
    PolicyBatch,
    PolicySequence,
    StepResult,
    SupervisedSequence,
)
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from etude.trainer.model.parameters import gather_full, local_shard

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
QWEN = Qwen3MoeConfig(**SMALL, head_dim=8, num_experts=8, moe_intermediate_size=16)
DEEPSEEK = DeepseekV3Config(
    **SMALL,
    moe_intermediate_size=16,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
PHASE: dict[str, Any] = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 9,
    # Where a gradient is small beside rounding, a smaller epsilon would make its sign a step.
    "optimizer": {"learningRate": "1e-2", "gradientClip": "0.05", "epsilon": "1e-3"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
BALANCING: dict[str, Any] = PHASE | {"optimizer": PHASE["optimizer"] | {"expertBiasRate": "0.01"}}
REPLAYING: dict[str, Any] = {
    "name": "rl",
    "type": "ReinforcementLearning",
    "maxSteps": 9,
    "optimizer": PHASE["optimizer"],
    "tasks": [{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
    "algorithm": {"name": "DrGRPO"},
    "routerReplay": {"mode": "Recorded"},
}
RECOMPUTING = REPLAYING | {
    "algorithm": {"name": "DrGRPO", "parameters": {"updatesPerBatch": 2}},
    "routerReplay": {"mode": "Recompute"},
}


class Case(NamedTuple):
    """A model, and the mesh of the ranks that train it."""

    config: PretrainedConfig
    mesh: dict[str, int]
    packing: str = "Padded"
    activation_checkpointing: str = "None"
    ranks: int = 4
    lora: Lora | None = None
    phase: dict[str, Any] = PHASE


CASES = {
    "FSDP": Case(QWEN, {"expert": 2}),
    "HSDP": Case(QWEN, {"expert": 2, "replicas": 2}),
    "all ranks": Case(QWEN, {"expert": 4}, "Packed", "Blocks"),
    "shared rows": Case(QWEN, {"expert": 2, "context": 2}, "Packed"),
    "shared experts": Case(DEEPSEEK, {"expert": 2}, "Packed", "Selective", phase=BALANCING),
    "recorded experts": Case(QWEN, {"expert": 2}, "Packed", "Blocks", phase=REPLAYING),
    "recomputed experts": Case(QWEN, {"expert": 2}, "Packed", phase=RECOMPUTING),
    "adapters": Case(QWEN, {"expert": 2}, lora=Lora(rank=4, target_modules=("q_proj", "v_proj"))),
    # Three ranks cut the four experts of each place in parts of 2, 2 and 0.
    "six ranks": Case(QWEN, {"expert": 2}, ranks=6),
}


class Trained(NamedTuple):
    """What a learner did, and the state that it is in."""

    losses: list[float]
    norms: list[float]
    loads: list[dict[str, float]]
    """Figures of the load of experts."""
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """Of the last step, clipped."""
    states: list[str]
    """Digests of the published versions: before the steps, and after them."""
    digest: str


def texts(seed: int) -> list[SupervisedSequence]:
    """Sequences for some microbatches of a step; of a single one, ranks have none."""
    draw = np.random.default_rng(seed)
    return [
        SupervisedSequence(
            token_ids=draw.integers(0, 64, length).astype(np.int32),
            weights=draw.choice(np.array([0.5, 1.0], np.float32), length),
        )
        for length in ((17, 9, 40, 2, 25, 31, 3), (12,))[seed % 2]
    ]


def rollouts(seed: int, *, has_routes: bool) -> PolicyBatch:
    """Groups of two rollouts for a step; recorded experts are of all but the last token."""
    draw = np.random.default_rng(seed)
    lengths = ((17, 9, 40, 2, 25, 31), (12, 7, 3, 22))[seed % 2]
    sequences = tuple(
        PolicySequence(
            token_ids=draw.integers(0, 64, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            sampler_logprobs=draw.uniform(-5, -4, length).astype(np.float32),
            rollout=rollout,
            routes=recorded_experts(length) if has_routes else None,
        )
        for rollout, length in enumerate(lengths)
    )
    return PolicyBatch(
        sequences=sequences,
        rewards=np.tile([0.0, 1_000.0], len(lengths) // 2),  # gradients are clipped
        groups=np.arange(len(lengths)) // 2,
        valid=np.ones(len(lengths), dtype=np.bool_),
    )


def recorded_experts(length: int) -> ExpertIds:
    """Expert 5 for each token, and one of the first three: others compute last tokens alone."""
    first = (np.arange(length)[:, None] + np.arange(2)) % 3
    ids = np.stack([first, np.full_like(first, 5)], -1).astype(np.uint8)
    ids[-1] = np.iinfo(np.uint8).max
    return ids


def make_step(learner: Learner, case: Case, seed: int) -> StepResult:
    """Make a step of the case's phase."""
    if case.phase["type"] == PHASE["type"]:
        return learner.supervised_step(texts(seed))
    return learner.policy_step(rollouts(seed, has_routes=case.phase is REPLAYING))


def open_learner(case: Case, folder: Path, rank: int, size: int) -> Learner:
    """One of as many ranks; a single one pads its rows."""
    divided: dict[str, Any] = {}
    if size > 1:
        checkpointing = case.activation_checkpointing
        divided = case.mesh | {"packing": case.packing, "activation_checkpointing": checkpointing}
    return Learner(
        LearnerConfig(
            run="uid",
            holder=f"rank-{rank}",
            model_folder=folder / "model",
            storage=Storage(uri=f"file://{folder}"),
            weights=Weights(dtype="Float32"),
            micro_batch_tokens=64,
            rank=rank,
            world_size=size,
            rendezvous=f"file://{folder}/meet",
            lora=case.lora,
            **{"packing": "Padded", **divided},
        )
    )


class Versions:
    """Versions of the weights, complete at first, then as deltas."""

    def __init__(self, learner: Learner, size: int) -> None:
        self.learner, self.size = learner, size
        self.base: PublishBase | None = None
        self.states: list[str] = []

    def encode(self) -> None:
        """Encode and upload the weights; the manifest is put together by every rank alike."""
        version = VersionId(self.size, len(self.states))
        receipt = self.learner.encode(version, self.base)
        self.learner.upload(version)
        receipts = [receipt] * self.size
        if self.size > 1:
            dist.all_gather_object(receipts, receipt)
        base = None if self.base is None else self.base.ref
        manifest = build_manifest(
            receipts, run="uid", version=version, step=0, holder="test", base=base
        )
        self.base = PublishBase(manifest.ref, manifest.schema_sha256)
        self.states.append(manifest.ref.state)


def train(learner: Learner, versions: Versions, case: Case) -> Trained:
    """Encode a version, make steps, encode a delta, and store a checkpoint."""
    versions.encode()
    learner.start_phase(case.phase, 0)
    results = [make_step(learner, case, seed) for seed in range(3)]
    versions.encode()
    learner.copy_state(f"checkpoint-{versions.size}")
    learner.save(f"checkpoint-{versions.size}")
    named = dict(learner.policy.named_parameters())
    gradients = {n: p.grad for n, p in named.items() if p.grad is not None}
    return Trained(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        [
            {name: value for name, value in result.extra.items() if name.startswith("expert_load")}
            for result in results
        ],
        {name: gather_full(p.detach()).clone() for name, p in named.items()},
        {name: gather_full(gradient).clone() for name, gradient in gradients.items()},
        versions.states,
        learner.digest(),
    )


def largest(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Largest difference of pairs, relative to values above 1: fp32 has 24 bits of each."""
    return max(
        float(((found - expected).abs() / expected.abs().clamp(min=1)).max())
        for found, expected in ((torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs)
    )


def compare(rank: int, folder: Path, case: Case) -> dict[str, Any]:
    """Train as one rank and as several, and let each go on from the checkpoint of the other."""
    one = open_learner(case, folder, 0, size=1)
    alone = train(one, Versions(one, 1), case) if rank == 0 else None
    # The other ranks wait here until rank 0 joins them.
    learner = open_learner(case, folder, rank, size=case.ranks)
    versions = Versions(learner, case.ranks)
    divided = train(learner, versions, case)
    learner.restore("checkpoint-1")
    resumed = learner.digest()
    versions.base = None
    versions.encode()
    following = make_step(learner, case, 4)
    held = sum(local_shard(p.detach()).numel() for p in learner.policy.model.parameters())
    learner.close()
    # What torch remembers of operations on shards names meshes of groups that were left.
    debug._clear_sharding_prop_cache()
    if alone is None:
        return {}
    expected = make_step(one, case, 4)
    one.restore(f"checkpoint-{case.ranks}")
    pairs = [(divided.gradients[name], gradient) for name, gradient in alone.gradients.items()]
    return {
        "gradients": largest(pairs) / max(float(gradient.abs().max()) for _, gradient in pairs),
        "loss": largest(zip(divided.losses, alone.losses, strict=True)),
        "norm": largest(zip(divided.norms, alone.norms, strict=True)),
        "loads": (divided.loads, alone.loads),
        "weights": largest((divided.weights[n], weight) for n, weight in alone.weights.items()),
        "next loss": abs(following.loss - expected.loss),
        "weights changed": alone.states[0] != alone.states[1],
        "norms": alone.norms,
        "first version": divided.states[0] == alone.states[0],
        "resumed": resumed == alone.digest,
        "resumed version": versions.states[2] == alone.states[1],
        "reread": one.digest() == divided.digest,
        "cpu_seconds": time.process_time(),
        "share": held / sum(p.numel() for p in one.policy.model.parameters()),
    }


def compare_all(rank: int, folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The comparisons of cases that have the same number of ranks, on one of these."""
    return {name: compare(rank, folder / name, CASES[name]) for name in names}


def save_models(folder: Path, names: Sequence[str]) -> None:
    """Save the model of each case in a folder of its own."""
    for name in names:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CASES[name].config, dtype=torch.float32)
        model.save_pretrained(folder / name / "model")
