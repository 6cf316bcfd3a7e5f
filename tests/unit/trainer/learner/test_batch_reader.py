"""Learner ranks read the rollouts of their batch, and train what was accepted or nothing."""

import time

import numpy as np
import pytest
from tests.support.trainer_simulation.workers import SimulatedRollouts

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import DeniedError, MemoryStore
from etude.common.errors import CorruptError, StoreError, WrongStateError
from etude.common.weights import VersionId
from etude.trainer.controller.admission.groups import RolloutGroup, build_policy_batch
from etude.trainer.learner.batch_reader import read_batch
from etude.trainer.learner.batches import PolicyBatch
from etude.trainer.learner.rows import policy_rows
from etude.trainer.rollouts.protocol import GroupRequest
from etude.v1 import journal_pb2

V1 = VersionId(1, 1)


async def make_batch(store: MemoryStore | None, *, held: int | None = None) -> PolicyBatch:
    """The batch of a group whose tokens are in a store, or in the records if there is none.

    Args:
        store: gets the tokens.
        held: index of a rollout whose record holds them all the same.
    """
    request = GroupRequest(
        group_id="g",
        task_id="t",
        task_uri="file:///t",
        environment="repos",
        indices=(0, 1, 2),
        seed=5,
        temperature=1.0,
        limits=RolloutPolicy(),
    )
    stored = await SimulatedRollouts(lambda: V1, store=store).run(request)
    plain = await SimulatedRollouts(lambda: V1).run(request)
    group = RolloutGroup(group_id="g", phase="rl", position=0, task_id="t", seed=5, sequence=1)
    for index in request.indices:
        data = (plain if index == held else stored).records[index]
        group.finished[index] = journal_pb2.JournalRollout.FromString(data)
    return build_policy_batch([group], current={V1})


def same(one: PolicyBatch, other: PolicyBatch) -> bool:
    pairs = list(zip(one.sequences, other.sequences, strict=True))
    return all(
        a.rollout == b.rollout
        and np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
        and np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
        and a.is_current is not None
        and b.is_current is not None
        and np.array_equal(a.is_current, b.is_current)
        for a, b in pairs
    )


@pytest.mark.parametrize("held", [None, 0, 1, 2])
async def test_a_batch_from_the_store_is_that_of_records_that_hold_their_tokens(
    held: int | None,
) -> None:
    store, whole = MemoryStore(), await make_batch(None)
    batch = await make_batch(store, held=held)
    assert len(batch.stored) == (3 if held is None else 2)
    read = read_batch(store, batch)
    assert not read.stored
    assert same(read, whole)
    assert (read.rewards == whole.rewards).all()
    assert any(each.is_current is not None and each.is_current.any() for each in read.sequences)


async def test_a_rollout_that_is_gone_or_damaged_is_named() -> None:
    store = MemoryStore()
    batch = await make_batch(store)
    key = sorted(store.objects)[1]
    data = store.objects.pop(key)
    with pytest.raises(CorruptError, match=key):
        read_batch(store, batch)
    store.objects[key] = bytes(len(data))
    with pytest.raises(CorruptError, match=key):
        read_batch(store, batch)


async def test_a_rank_waits_for_a_store_that_is_away_however_long_and_not_for_one_that_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, waits = MemoryStore(), list[float]()
    batch = await make_batch(store)
    monkeypatch.setattr(time, "sleep", waits.append)
    read = MemoryStore.get_range

    def get_range(self: MemoryStore, key: str, start: int, length: int) -> bytes:
        if sum(waits) < 5_000:
            raise StoreError("away")
        return read(self, key, start, length)

    monkeypatch.setattr(MemoryStore, "get_range", get_range)
    assert len(read_batch(store, batch).sequences) == 3

    def deny(self: MemoryStore, key: str, start: int, length: int) -> bytes:
        raise DeniedError("no right to read")

    monkeypatch.setattr(MemoryStore, "get_range", deny)
    with pytest.raises(DeniedError, match="no right"):
        read_batch(store, batch)


async def test_rows_are_never_built_from_a_batch_that_was_not_read() -> None:
    batch = await make_batch(MemoryStore())
    with pytest.raises(WrongStateError, match="3 rollouts"):
        policy_rows(batch, None)  # type: ignore[arg-type] # refused before it is asked
