"""Sequence packing: assignment of sequences to ranks and to microbatches of bounded size."""

from collections.abc import Sequence

MicrobatchIndices = tuple[int, ...]
"""Indices of sequences in the batch."""


def plan_microbatches(
    lengths: Sequence[int], *, ranks: int, max_tokens: int
) -> tuple[tuple[MicrobatchIndices, ...], ...]:
    """Spread sequences over ranks by cost, then cut each rank's share into microbatches.

    Every rank gets the same number of microbatches, because each pass has collectives; some may be
    empty. A function of its arguments alone, so that each rank computes the same plan.

    Args:
        lengths: tokens of each sequence.
        ranks: number of ranks that share the work.
        max_tokens: padded tokens of one microbatch; a longer sequence stands alone.

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
