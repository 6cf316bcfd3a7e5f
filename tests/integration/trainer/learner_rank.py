"""One learner rank in its own process: two phases, save, export, restore."""

import json
import sys
from pathlib import Path

import numpy as np
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode

from etude.common.api.run.roles import Lora
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.trainer.learner.batches import (
    PolicyBatch,
    PolicySequence,
    StepResult,
    SupervisedSequence,
)
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

MODEL = Path(__file__).parents[2] / "data" / "tiny-model"


def texts(seed: int, count: int) -> list[SupervisedSequence]:
    rng = np.random.default_rng(seed)
    return [
        SupervisedSequence(
            token_ids=rng.integers(0, 64, length).astype(np.int32),
            weights=rng.choice(np.array([0.5, 1.0], np.float32), length),
        )
        for length in rng.integers(3, 40, count)
    ]


def rollouts(seed: int, count: int = 12) -> PolicyBatch:
    rng = np.random.default_rng(seed)
    sequences = [
        PolicySequence(
            token_ids=rng.integers(0, 64, length).astype(np.int32),
            loss_mask=np.arange(length) > 3,
            sampler_logprobs=np.full(length, -4.2, np.float32),
            rollout=rollout,
        )
        for rollout, length in enumerate(rng.integers(5, 40, count))
    ]
    return PolicyBatch(
        sequences=tuple(sequences),
        rewards=rng.random(count),
        groups=np.arange(count) // 4,
        valid=rng.random(count) < 0.9,
    )


def phase(kind: str, **fields: object) -> dict[str, object]:
    optimizer = {"learningRate": "1e-4", "weightDecay": "0.01", "gradientClip": "0.05"}
    return {"name": kind.lower(), "type": kind, "maxSteps": 9, "optimizer": optimizer, **fields}


SFT = phase("SupervisedFineTuning", data=[{"name": "traces", "uri": "file:///traces.jsonl"}])
RL = phase(
    "ReinforcementLearning",
    tasks=[{"name": "train", "uri": "file:///tasks", "environment": "repos"}],
    algorithm={"parameters": {"lossScale": 16, "klCoefficient": 0.05}},
)
WHOLE_ROLLOUTS = RL | {
    "name": "whole-rollouts",
    "algorithm": {
        "name": "GSPO",
        "parameters": {
            "updatesPerBatch": 2,
            "clipLow": 0.5,
            "clipHigh": 0.5,
            "opsmDelta": 0.05,
            "klCoefficient": 0.05,
            "klCredit": "Sequence",
            "klLimit": 10,
        },
    },
}


def count_collectives(learner: Learner) -> dict[str, int]:
    """Collectives of a step with one pass of each rank, and how many modules FSDP shards."""
    with CommDebugMode() as collectives:
        learner.policy_step(rollouts(11, count=4))
    found = {str(name): count for name, count in collectives.get_comm_counts().items()}
    modules = sum(isinstance(module, FSDPModule) for module in learner.policy.modules())
    return found | {"modules": modules}


def train_phases(learner: Learner) -> list[StepResult]:
    learner.start_phase(SFT, 0)
    # The last batch has one sequence: with two ranks, one of them has nothing to do.
    results = [learner.supervised_step(texts(seed, 1 if seed == 2 else 7)) for seed in range(3)]
    learner.start_phase(WHOLE_ROLLOUTS, 0)
    results += [learner.policy_step(rollouts(seed)) for seed in range(3, 5)]
    learner.start_phase(RL, 0)
    return results + [learner.policy_step(rollouts(seed)) for seed in range(3)]


def main(
    rank: int, world_size: int, folder: Path, replicas: int, context: int, lora_rank: int
) -> None:
    name = str(world_size) if context == 1 else f"{world_size}-sharing-{context}"
    learner = Learner(
        LearnerConfig(
            run="uid",
            holder=f"rank-{rank}",
            model_folder=MODEL,
            seed=1,
            storage=Storage(uri=f"file://{folder}"),
            weights=Weights(dtype="Float32"),
            micro_batch_tokens=64,
            rank=rank,
            world_size=world_size,
            replicas=replicas,
            context=context,
            lora=Lora(rank=lora_rank) if lora_rank else None,
            rendezvous=f"file://{folder}/meet-{name}",
        )
    )
    results = train_phases(learner)
    # A pass without gradient leaves FSDP's root gathered, which must not be what is saved.
    learner.held_out_loss(texts(5, 3))
    learner.copy_state(f"checkpoint-{name}")
    learner.save(f"checkpoint-{name}")
    # Collective: after it, every rank has stored its part.
    learner.export(f"export-{name}")
    learner.export_adapter(f"export-{name}")
    # Two ranks run first: others read what they wrote.
    learner.restore("checkpoint-2")
    restored = learner.digest()
    results.append(learner.policy_step(rollouts(9)))
    collectives: dict[str, int] = {}
    if lora_rank:
        # The counter's tracker of modules knows one pass at a time, and no frozen inputs of a next.
        learner.start_phase({**RL, "algorithm": {"parameters": {"lossScale": 16}}}, 5)
    if world_size > 1:
        collectives = count_collectives(learner)
    learner.close()
    if rank == 0:
        found = [
            [r.loss, r.grad_norm, r.mismatch_max, r.extra.get("reference_kl", 0)] for r in results
        ]
        sys.stdout.write(
            json.dumps({"results": found, "restored": restored, "collectives": collectives})
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
