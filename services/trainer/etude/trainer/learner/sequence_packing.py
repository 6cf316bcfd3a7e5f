"""Sequence packing: sequences assigned to ranks, and laid into microbatches.

A padded microbatch has one sequence a row; a packed one has a single row with its sequences one
behind the other, so that no padding goes through the model.
Shapes: B rows of a microbatch, T their length, N their trained tokens, S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from etude.common.errors import InvalidFieldError
from etude.kernels.routing import MISSING
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.rows import TrainingRow
from etude.trainer.model.context_parallel import UNDIVIDED, ContextGroup, check_context
from etude.trainer.model.flops import BY_TOKENS, SequenceCost, sequence_cost
from etude.trainer.model.packed_attention import check_packing

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
    is_current: Tensor
    """True where the weights of this step sampled the token. Empty for supervised rows. [N]"""
    tokens: Tensor
    """Numbers of the trained tokens in the pass; empty where nothing is recorded. [N]"""
    proximal_logprobs: Tensor
    """Empty if the gradient pass has them, as have the two below. [N]"""
    sequence_log_rho: Tensor
    """[N]"""
    sequence_log_ratio: Tensor
    """[N]"""
    guessing: Tensor
    """Positions of the flattened rows at which a head of multi-token prediction guesses."""
    routes: Tensor | None = None
    """Experts to take, where rows have recorded ones. int16 [B, T, M, k]"""
    lengths: tuple[int, ...] = ()
    """Of the sequences of a packed row; empty if rows are padded. [S]"""
    starts: tuple[int, ...] = ()
    """Position of the first token of each training row in the flattened rows."""
    sizes: tuple[int, ...] = ()
    """Tokens of each training row."""
    numbers: tuple[int, ...] = ()
    """Numbers of the training rows in a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Form of the microbatches of a step."""

    max_tokens: int
    """Of one microbatch, padding included; a longer sequence is alone."""
    cost: SequenceCost = BY_TOKENS
    """Of one sequence, by which ranks share the work."""
    packed: bool = False
    """True if sequences are packed and not padded."""


def build_packing(
    config: LearnerConfig, model: PreTrainedModel, *, device: torch.device
) -> Packing:
    """Build the form of microbatches that a rank's configuration asks for.

    Raises:
        InvalidFieldError: the model does not allow it.
    """
    return Packing(
        max_tokens=config.micro_batch_tokens // config.context * config.context,
        cost=sequence_cost(model),
        packed=uses_packing(config.packing, model.config, context=config.context, device=device),
    )


def uses_packing(
    packing: str, model: PretrainedConfig, *, context: int, device: torch.device
) -> bool:
    """True if sequences are packed: on request, or on a GPU for a model that allows it.

    Args:
        packing: Auto, Packed or Padded.
        model: its configuration.
        context: ranks that share a row.
        device: of the rank.

    Raises:
        InvalidFieldError: it was requested, and the model does not allow it.
    """
    is_split = context > 1
    if not is_split and (packing == "Padded" or (packing == "Auto" and device.type != "cuda")):
        return False
    try:
        check_packing(model)
        check_context(model, context)
    except ValueError as cause:
        if is_split:
            raise InvalidFieldError("roles.trainer.mesh.context", f"{cause}; set 1") from cause
        if packing == "Auto":
            return False
        raise InvalidFieldError("roles.trainer.packing", f"{cause}; set Padded") from cause
    return True


def collate(
    rows: Sequence[TrainingRow],
    *,
    device: torch.device,
    packed: bool = False,
    context: ContextGroup = UNDIVIDED,
) -> Microbatch:
    """Collate rows into one microbatch; no rows give a token of weight 0 for each rank.

    Every pass has collectives, so a rank without rows takes part too. Of a packed row, each rank
    of a context group trains the tokens that its own tokens predict.
    """
    if packed:
        token_ids, lengths = _lay_in_row(rows, context)
        starts = np.cumsum([0, *lengths[:-1]])[: len(rows)]
        places = [row.places + start for row, start in zip(rows, starts, strict=True)]
        owners = np.zeros(sum(row.places.size for row in rows), dtype=np.int64)
    else:
        token_ids, lengths = _pad_rows(rows), ()
        starts = np.arange(len(rows)) * token_ids.shape[1]
        places = [row.places for row in rows]
        owners = np.repeat(np.arange(len(rows)), [row.places.size for row in rows])
    own = context.own_tokens(token_ids.shape[1])
    every = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    predicted = (own.start < every) & (every <= own.stop)

    def select(parts: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        whole = np.concatenate([np.zeros(0), *parts])
        # Supervised rows have no advantages and nothing that was sampled.
        return torch.from_numpy(whole[predicted] if whole.size else whole).to(device, dtype)

    return Microbatch(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)).to(device),
        rows=select([owners], torch.int64),
        places=select([every], torch.int64),
        lengths=lengths,
        weights=select([row.weights for row in rows], torch.float32),
        advantages=select([row.advantages for row in rows], torch.float32),
        sampler_logprobs=select([row.sampler_logprobs for row in rows], torch.float32),
        is_current=select([row.is_current for row in rows], torch.bool),
        tokens=select([row.tokens for row in rows], torch.int64),
        proximal_logprobs=select([row.proximal_logprobs for row in rows], torch.float32),
        sequence_log_rho=select([row.sequence_log_rho for row in rows], torch.float32),
        sequence_log_ratio=select([row.sequence_log_ratio for row in rows], torch.float32),
        guessing=_lay_guesses(rows, starts).to(device),
        routes=_lay_routes(rows, starts, token_ids.shape, device),
        starts=tuple(starts.tolist()),
        sizes=tuple(row.token_ids.size for row in rows),
        numbers=tuple(row.number for row in rows),
    )


def _pad_rows(rows: Sequence[TrainingRow]) -> NDArray[np.int64]:
    """Lay each sequence in a row of its own, padded on the right; one row without any. [B, T]."""
    token_ids = np.full((max(1, len(rows)), _longest(rows)), PAD, dtype=np.int64)
    for index, row in enumerate(rows):
        token_ids[index, : row.token_ids.size] = row.token_ids
    return token_ids


def _lay_guesses(rows: Sequence[TrainingRow], starts: NDArray[np.int64]) -> Tensor:
    """Positions of the flattened rows at which a head guesses. [G]."""
    parts = [start + np.arange(num_guesses(row)) for row, start in zip(rows, starts, strict=True)]
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))


def _lay_routes(
    rows: Sequence[TrainingRow],
    starts: NDArray[np.int64],
    shape: tuple[int, ...],
    device: torch.device,
) -> Tensor | None:
    """Lay recorded experts as the tokens lie; None if no row has any.

    Returns:
        Ids, and MISSING for tokens without. [B, T, M, k]
    """
    recorded = [row.routes for row in rows if row.routes is not None]
    if not recorded:
        return None
    laid = np.full((shape[0] * shape[1], *recorded[0].shape[1:]), MISSING, dtype=np.int16)
    for row, start in zip(rows, starts, strict=True):
        if row.routes is not None:
            laid[start : start + len(row.routes)] = row.routes
    return torch.from_numpy(laid.reshape(*shape, *laid.shape[1:])).to(device)


def num_guesses(row: TrainingRow) -> int:
    """Positions of a sequence at which a head of multi-token prediction guesses a token of it."""
    return max(0, row.token_ids.size - 2)


def _lay_in_row(
    rows: Sequence[TrainingRow], context: ContextGroup
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Lay sequences one behind the other, and padding that ranks can share the row evenly.

    Returns:
        The row, [1, T], and the lengths of its sequences, the padding being one. [S]
    """
    parts: list[np.ndarray] = [row.token_ids for row in rows]
    total = sum(part.size for part in parts)
    missing = context.padding(total) if total else context.size
    if missing:
        parts.append(np.full(missing, PAD))
    return np.concatenate(parts)[None], tuple(part.size for part in parts)


def _longest(rows: Sequence[TrainingRow]) -> int:
    return max((row.token_ids.size for row in rows), default=1)


MicrobatchIndices = tuple[int, ...]
"""Indices of sequences in the batch."""


def plan_microbatches(
    lengths: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    cost: SequenceCost = BY_TOKENS,
    packed: bool = False,
) -> tuple[tuple[MicrobatchIndices, ...], ...]:
    """Spread sequences over ranks by cost, then cut each rank's share into microbatches.

    Every rank gets the same number of microbatches, because each pass has collectives; some may be
    empty. A function of its arguments alone, so that each rank computes the same plan.

    Args:
        lengths: of the sequences, in tokens.
        ranks: that share them.
        max_tokens: of one microbatch, padding included; a longer sequence is alone.
        cost: of one sequence.
        packed: true if sequences are packed and not padded.

    Returns:
        For each rank its microbatches. Padded ones have sequences of similar length, packed ones
        similar cost, so that ranks wait little for each other.
    """
    costs = [cost.of(length) for length in lengths]
    shares = _shares(costs, lengths, ranks)
    if packed:
        num = max(len(_fill_bins(share, lengths, max_tokens)) for share in shares)
        dealt = _deal_bins(costs, lengths, ranks=ranks, max_tokens=max_tokens, below=num)
        if dealt is not None:
            return dealt
        return tuple(_balance_bins(share, lengths, costs, max_tokens, num) for share in shares)
    cut = [_microbatches(share, lengths, max_tokens) for share in shares]
    most = max(len(share) for share in cut)
    return tuple((*share, *([()] * (most - len(share)))) for share in cut)


def _shares(costs: Sequence[float], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign the longest sequence first to the least loaded rank."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return shares


def _deal_bins(
    costs: Sequence[float], lengths: Sequence[int], *, ranks: int, max_tokens: int, below: int
) -> tuple[tuple[MicrobatchIndices, ...], ...] | None:
    """Pack sequences before ranks share them, if that takes fewer microbatches of each rank.

    Shares of equal cost may not fill the bins of one rank, where those of all ranks together would.
    A microbatch less is worth more than equal costs: all ranks wait in each.

    Args:
        costs: of the sequences.
        lengths: of the sequences, in tokens.
        ranks: that share them.
        max_tokens: of one microbatch.
        below: microbatches of each rank that shares of equal cost take.

    Returns:
        For each rank its microbatches; None if there are not fewer.
    """
    if ranks * (below - 1) * max_tokens < sum(min(each, max_tokens) for each in lengths):
        return None  # a longer sequence is alone
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _fill_bins(order, lengths, max_tokens)
    num = -(-len(bins) // ranks)
    if num >= below:
        return None
    loads = [sum(costs[index] for index in each) for each in bins]
    dealt: list[list[MicrobatchIndices]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for place in sorted(range(len(bins)), key=lambda i: (-loads[i], i)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < num), key=totals.__getitem__)
        dealt[rank].append(tuple(bins[place]))
        totals[rank] += loads[place]
    return tuple((*own, *([()] * (num - len(own)))) for own in dealt)


def _fill_bins(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack sequences, longest first, each into the fullest bin that has room."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in share:
        fitting = (i for i, room in enumerate(free) if room >= lengths[index])
        place = min(fitting, key=free.__getitem__, default=len(bins))
        if place == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[place].append(index)
        free[place] -= lengths[index]
    return bins


def _balance_bins(
    share: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[float],
    max_tokens: int,
    num: int,
) -> tuple[MicrobatchIndices, ...]:
    """Pack sequences into a number of bins of similar cost; by room alone if that fails."""
    bins: list[list[int]] = [[] for _ in range(num)]
    loads, free = [0.0] * num, [max_tokens] * num
    for index in share:
        fitting = [i for i in range(num) if free[i] >= lengths[index] or not bins[i]]
        if not fitting:
            filled = _fill_bins(share, lengths, max_tokens)
            return tuple(map(tuple, (*filled, *([[]] * (num - len(filled))))))
        place = min(fitting, key=loads.__getitem__)
        bins[place].append(index)
        loads[place] += costs[index]
        free[place] -= lengths[index]
    return tuple(map(tuple, bins))


def _microbatches(
    share: Sequence[int], lengths: Sequence[int], max_tokens: int
) -> list[MicrobatchIndices]:
    """Cut sequences, longest first, into microbatches that padding fits."""
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
