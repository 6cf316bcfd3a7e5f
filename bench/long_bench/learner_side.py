"""The way of a finished rollout to the learner: check, and microbatches."""

import numpy as np
import torch

from etude.agent.local import INITIAL
from etude.common.api.run.phases import Algorithm
from etude.trainer.algorithms.registry import build_algorithm
from etude.trainer.contents.rollout_checks import check_rollout
from etude.trainer.learner.batches import PolicyBatch, PolicySequence, links_of
from etude.trainer.learner.rows import policy_rows
from etude.trainer.learner.sequence_packing import collate, plan_microbatches
from etude.v1 import rollout_pb2


def check(rollout: rollout_pb2.Rollout, *, vocab_size: int, context: int) -> None:
    """Check a rollout as the controller does before it acknowledges it."""
    check_rollout(rollout, vocab_size=vocab_size, max_tokens=context, position_of={INITIAL: 0}.get)


def pack(rollout: rollout_pb2.Rollout, *, tokens: int, context: int) -> int:
    """Build the microbatches of a step that trains the rollout and a sibling of nothing.

    Args:
        rollout: checked.
        tokens: limit of a rollout.
        context: limit of a microbatch.

    Returns:
        The number of trained tokens.
    """
    sequences = [*links_of(rollout, index=0), _sibling(index=1)]
    algorithm = build_algorithm(Algorithm.model_validate({"name": "DrGRPO"}), max_tokens=tokens)
    batch = PolicyBatch(
        sequences=tuple(sequences),
        rewards=np.array([1.0, 0.0]),
        groups=np.zeros(2, dtype=np.int64),
        valid=np.ones(2, dtype=np.bool_),
    )
    rows = policy_rows(batch, algorithm).rows
    lengths = [row.token_ids.size for row in rows]
    (share,) = plan_microbatches(lengths, ranks=1, max_tokens=context, packed=True)
    for indices in share:
        collate([rows[each] for each in indices], device=torch.device("cpu"), packed=True)
    return sum(row.places.size for row in rows)


def _sibling(*, index: int) -> PolicySequence:
    mask = np.array([False, True])
    return PolicySequence(
        token_ids=np.array([1, 2], dtype=np.int32),
        loss_mask=mask,
        sampler_logprobs=np.array([0, -0.5], dtype=np.float32),
        rollout=index,
    )
