"""Who trains what."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.learner.rows import TrainingRow
from etude.trainer.learner.sequence_packing import collate, plan_microbatches
from etude.trainer.model.context_parallel import ContextGroup
from etude.trainer.model.flops import SequenceCost

LENGTHS = st.lists(st.integers(1, 300), max_size=40)


@given(lengths=LENGTHS, ranks=st.integers(1, 5), max_tokens=st.integers(1, 1_000))
def test_every_sequence_is_in_exactly_one_microbatch(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    shares = plan_microbatches(lengths, ranks=ranks, max_tokens=max_tokens)
    found = sorted(index for share in shares for batch in share for index in batch)
    assert found == list(range(len(lengths)))


@given(lengths=LENGTHS, ranks=st.integers(1, 5), max_tokens=st.integers(1, 1_000))
def test_ranks_meet_in_equally_many_microbatches_within_the_limit(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    shares = plan_microbatches(lengths, ranks=ranks, max_tokens=max_tokens)
    assert len({len(share) for share in shares}) == 1
    for batch in (batch for share in shares for batch in share):
        padded = len(batch) * max((lengths[index] for index in batch), default=0)
        assert padded <= max_tokens or len(batch) == 1


def test_work_is_spread_evenly() -> None:
    lengths = [100, 90, 80, 70, 60, 50, 40, 30]
    loads = [
        sum(lengths[index] for batch in share for index in batch)
        for share in plan_microbatches(lengths, ranks=2, max_tokens=1_000)
    ]
    assert max(loads) / (sum(loads) / 2) == pytest.approx(1.0, abs=0.05)


def test_sequences_of_similar_length_share_a_microbatch() -> None:
    assert plan_microbatches([10, 100, 11, 99], ranks=1, max_tokens=200) == (((1, 3), (2, 0)),)


COSTS = st.builds(SequenceCost, st.floats(0.1, 10), st.floats(0, 1))


@given(lengths=LENGTHS, ranks=st.integers(1, 5), max_tokens=st.integers(1, 1_000), cost=COSTS)
def test_packed_microbatches_hold_each_sequence_once_within_the_limit(
    lengths: list[int], ranks: int, max_tokens: int, cost: SequenceCost
) -> None:
    plan = plan_microbatches(lengths, ranks=ranks, max_tokens=max_tokens, cost=cost, packed=True)
    found = sorted(index for share in plan for batch in share for index in batch)
    assert found == list(range(len(lengths)))
    assert len({len(share) for share in plan}) == 1
    for batch in (batch for share in plan for batch in share):
        assert sum(lengths[index] for index in batch) <= max_tokens or len(batch) == 1


def test_ranks_share_the_cost_of_attention_and_not_only_tokens() -> None:
    # One long sequence costs as much attention as a hundred of a tenth of its length.
    lengths, cost = [1_000, *[100] * 100], SequenceCost(1.0, 1.0)
    plan = plan_microbatches(lengths, ranks=2, max_tokens=20_000, cost=cost, packed=True)
    loads = [sum(cost.of(lengths[i]) for batch in share for i in batch) for share in plan]
    assert max(loads) / sum(loads) < 0.51


def test_packing_needs_fewer_passes_than_padding() -> None:
    lengths = [100, *[10] * 30]
    packed = plan_microbatches(lengths, ranks=1, max_tokens=200, packed=True)
    padded = plan_microbatches(lengths, ranks=1, max_tokens=200)
    assert (len(packed[0]), len(padded[0])) == (2, 3)


@given(lengths=st.lists(st.integers(1, 30), max_size=6), size=st.integers(1, 5))
def test_ranks_of_a_context_group_train_each_token_of_a_row_once(
    lengths: list[int], size: int
) -> None:
    rows = [
        TrainingRow(
            token_ids=np.arange(length, dtype=np.int32),
            places=np.arange(1, length),
            weights=np.arange(1, length, dtype=np.float32) + np.float32(100 * index),
        )
        for index, length in enumerate(lengths)
    ]
    parts = []
    for rank in range(size):
        group = ContextGroup(rank=rank, size=size)
        part = collate(rows, device=torch.device("cpu"), packed=True, context=group)
        total = part.token_ids.shape[1]
        assert total == sum(part.lengths)
        assert total % size == 0
        own = group.own_tokens(total)
        assert all(own.start <= place - 1 < own.stop for place in part.places.tolist())
        # Rows begin with token 0 and count up: a token's weight tells its row and its place.
        assert torch.equal(part.token_ids[part.rows, part.places], part.weights.long() % 100)
        parts.append(part)
    trained = torch.cat([part.weights for part in parts]).tolist()
    assert trained == [weight for row in rows for weight in row.weights.tolist()]


@given(lengths=LENGTHS, ranks=st.integers(1, 5), max_tokens=st.integers(1, 1_000), cost=COSTS)
def test_ranks_take_no_more_microbatches_than_all_sequences_together(
    lengths: list[int], ranks: int, max_tokens: int, cost: SequenceCost
) -> None:
    plan = plan_microbatches(lengths, ranks=ranks, max_tokens=max_tokens, cost=cost, packed=True)
    (alone,) = plan_microbatches(lengths, ranks=1, max_tokens=max_tokens, packed=True)
    assert len(plan[0]) <= -(-len(alone) // ranks)


def test_shares_of_equal_cost_that_fill_no_microbatch_are_packed_together() -> None:
    plan = plan_microbatches([6, 5, 4, 3, 2], ranks=2, max_tokens=10, packed=True)
    assert plan == (((0, 2),), ((1, 3, 4),)), "6, 3, 2 and 5, 4 would cost as much, in two passes"
