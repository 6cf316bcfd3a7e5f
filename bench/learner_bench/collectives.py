"""Collectives of a supervised step of two learner ranks over gloo, digest and figures included."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tests.support.trainer.collective_bytes import CollectiveBytes
from tests.support.trainer.rank_processes import run_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from transformers import LlamaConfig

from etude.common.api.storage import Storage
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner
from etude.trainer.model.policy import Policy

RANKS = 2
PHASE: dict[str, object] = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 2,
    "optimizer": {"learningRate": "1e-3"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}


def count_collectives() -> dict[str, float]:
    """Gathers of a step that are not FSDP's, and bytes of all collectives over those of FSDP."""
    with TemporaryDirectory() as name:
        LlamaConfig(
            vocab_size=4_096,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=768,
            max_position_embeddings=1_024,
            tie_word_embeddings=False,
        ).save_pretrained(name)
        found: dict[str, float] = run_ranks(run_step, Path(name), size=RANKS)
        return found


def run_step(rank: int, folder: Path) -> dict[str, float]:
    """Count the collectives of the second step on one of the ranks."""
    learner = Learner(
        LearnerConfig(
            run="bench",
            holder="bench",
            model_folder=folder,
            storage=Storage(uri=f"file://{folder}/run"),
            rank=rank,
            world_size=RANKS,
            rendezvous=f"file://{folder}/meet",
        )
    )
    learner.start_phase(PHASE, 0)
    batch = [
        SupervisedSequence(
            token_ids=np.arange(200, dtype=np.int32), weights=np.ones(200, np.float32)
        )
    ] * 4
    learner.supervised_step(batch)
    counter = CommDebugMode()  # type: ignore[no-untyped-call]
    with counter, CollectiveBytes() as traffic:
        learner.supervised_step(batch)
    gathers, scattered = _expected(learner)
    counts: dict[Any, int] = counter.get_comm_counts()
    all_gathers = sum(n for op, n in counts.items() if "gather" in str(op))
    result = {
        "full_gathers": float(all_gathers - gathers[0]),
        "collective_bytes_over_fsdp": sum(traffic.bytes.values()) / (gathers[1] + scattered),
    }
    learner.close()
    return result


def _expected(learner: Learner) -> tuple[tuple[int, int], int]:
    """Calls and bytes of FSDP's gathers in a step of one pass, and bytes of its scatters.

    Blocks are gathered in both directions, the root once.
    """
    calls = gathered = scattered = 0
    for module in learner.policy.modules():
        if not isinstance(module, FSDPModule):
            continue
        group = module._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        size = RANKS * 4 * sum(p.padded_sharded_param_size.numel() for p in group.fsdp_params)
        directions = 1 if isinstance(module, Policy) else 2
        calls += directions
        gathered += directions * size
        scattered += size
    return (calls, gathered), scattered
