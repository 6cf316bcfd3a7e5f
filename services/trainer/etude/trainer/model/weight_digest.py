"""Digest of all weights, added up from the ranks' own shards."""

import torch
from torch import Tensor

from etude.common.weights.tensors import digest
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.words import lanes_per_element
from etude.kernels.digest import digest_lanes, digest_scan
from etude.trainer.model import tensor_bits
from etude.trainer.model.fsdp import RankGroup
from etude.trainer.model.parameters import local_shard, parameters_by_name
from etude.trainer.model.policy import Policy
from etude.trainer.model.shard_runs import ShardRuns, owned_runs


def weight_digest(policy: Policy, ranks: RankGroup) -> str:
    """State digest of the master weights, concatenated in the order of their names; collective.

    A rank reads its own shards where they are, and sends two numbers. The digest does not depend
    on the number of ranks or their mesh.
    """
    own, first_lane = ZERO, 0
    for parameter in parameters_by_name(policy).values():
        tensor = parameter.detach()
        lanes = lanes_per_element(tensor_bits.NAMES[tensor.dtype])
        runs = owned_runs(tensor, is_first_rank=ranks.is_first)
        own = own.plus(_digest_runs(local_shard(tensor), runs, first_lane, lanes))
        first_lane += tensor.numel() * lanes
    return total_digest(own, ranks).hex()


def total_digest(own: Digest, ranks: RankGroup) -> Digest:
    """Sum of the digests of all ranks; collective."""
    # Sums of 64-bit integers wrap around, as those of the digest do.
    lanes = torch.tensor([_signed(own.a), _signed(own.b)], dtype=torch.int64)
    a, b = ranks.total(lanes).tolist()
    return Digest(a % (1 << 64), b % (1 << 64))


def _digest_runs(shard: Tensor, runs: ShardRuns, first_lane: int, lanes: int) -> Digest:
    flat, total = shard.reshape(-1), ZERO
    for start, local, length in zip(*(each.tolist() for each in runs), strict=True):
        run, lane = flat[local : local + length], first_lane + start * lanes
        if run.is_cuda:
            total = total.plus(Digest(*digest_lanes(digest_scan(run, first_lane=lane))))
        else:
            total = total.plus(digest.scan(tensor_bits.to_words(run, dtype=run.dtype), lane))
    return total


def _signed(lane: int) -> int:
    return lane - (1 << 64) if lane >= 1 << 63 else lane
