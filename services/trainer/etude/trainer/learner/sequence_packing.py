"""Sequence packing: sequences assigned to ranks, packed into microbatches, and padded.

Shapes: B rows of a microbatch, T their padded length, N their trained tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etude.trainer.learner.rows import TrainingRow

PAD = 0
"""Any id would do: padding is on the right and never scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Input of one forward and backward pass."""

    token_ids: Tensor
    """[B, T]"""
    rows: Tensor
    """Row of each trained token. [N]"""
    places: Tensor
    """Position of each trained token in its row. [N]"""
    weights: Tensor
    """Weight of each trained token in the loss. [N]"""
    advantages: Tensor
    """Empty for supervised rows. [N]"""
    sampler_logprobs: Tensor
    """Empty for supervised rows. [N]"""


def collate(rows: Sequence[TrainingRow], *, device: torch.device) -> Microbatch:
    """Collate rows into one microbatch; no rows give a token of weight 0.

    Every pass has collectives, so a rank without rows takes part too.
    """
    token_ids = np.full((max(1, len(rows)), _longest(rows)), PAD, dtype=np.int64)
    for index, row in enumerate(rows):
        token_ids[index, : row.token_ids.size] = row.token_ids
    return Microbatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        rows=torch.tensor(
            np.repeat(np.arange(len(rows)), [row.places.size for row in rows]), device=device
        ),
        places=_concatenate([row.places for row in rows], torch.int64, device),
        weights=_concatenate([row.weights for row in rows], torch.float32, device),
        advantages=_concatenate([row.advantages for row in rows], torch.float32, device),
        sampler_logprobs=_concatenate(
            [row.sampler_logprobs for row in rows], torch.float32, device
        ),
    )


def _longest(rows: Sequence[TrainingRow]) -> int:
    return max((row.token_ids.size for row in rows), default=1)


def _concatenate(parts: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device) -> Tensor:
    whole = np.concatenate(parts) if parts else np.zeros(0)
    return torch.from_numpy(whole).to(device=device, dtype=dtype)


MicrobatchIndices = tuple[int, ...]
"""Indices of sequences in the batch."""


def plan_microbatches(
    lengths: Sequence[int], *, ranks: int, max_tokens: int
) -> tuple[tuple[MicrobatchIndices, ...], ...]:
    """Spread sequences over ranks by cost, then cut each rank's share into microbatches.

    Every rank gets the same number of microbatches, because each pass has collectives; some may be
    empty. A function of its arguments alone, so that each rank computes the same plan.

    Returns:
        For each rank its microbatches, longest sequences first.
    """
    shares = [_microbatches(share, lengths, max_tokens) for share in _shares(lengths, ranks)]
    most = max(len(share) for share in shares)
    return tuple((*share, *([()] * (most - len(share)))) for share in shares)


def _shares(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign the longest sequence first to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def _microbatches(
    share: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[MicrobatchIndices]:
    batches: list[MicrobatchIndices] = []
    current: list[int] = []
    for index in share:
        # The first sequence is the longest, so all others are padded to it.
        if current and lengths[current[0]] * (len(current) + 1) > max_tokens:
            batches.append(tuple(current))
            current = []
        current.append(index)
    if current:
        batches.append(tuple(current))
    return batches
