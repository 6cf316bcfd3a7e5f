"""Learner ranks read the rollouts of their batch, and train what was accepted or nothing."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import numpy as np
import pytest
from tests.support.trainer.thread_ranks import run_thread_ranks
from tests.support.trainer_simulation.workers import CONTEXT, VOCABULARY, SimulatedRollouts
from typing_extensions import override

from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.blobs import DeniedError, MemoryStore
from etude.common.errors import StoreError, WrongStateError
from etude.common.weights import VersionId
from etude.trainer.contents.objects import write_links
from etude.trainer.controller.admission.groups import RolloutGroup, build_policy_batch
from etude.trainer.learner import batch_reader
from etude.trainer.learner.batch_reader import BatchReader, TokenLimits
from etude.trainer.learner.batches import DamagedRolloutsError, PolicyBatch
from etude.trainer.learner.data.rank_exchange import ProcessGroupExchange
from etude.trainer.learner.data.windows import RankExchange
from etude.trainer.learner.rows import policy_rows
from etude.trainer.rollouts.protocol import GroupRequest
from etude.v1 import journal_pb2, rollout_pb2
from etude.v1.rollout_content_pb2 import RolloutContent

T = TypeVar("T")
S = TypeVar("S")
V1 = VersionId(1, 1)
ALONE = ProcessGroupExchange(0, 1)


class OneThread:
    """A pool that works in the thread of its caller."""

    def __init__(self, _workers: int, thread_name_prefix: str) -> None:
        self.name = thread_name_prefix

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, work: Callable[[T], S], items: Iterable[T]) -> Iterator[S]:
        return map(work, items)


def read_batch(store: MemoryStore, batch: PolicyBatch, ranks: RankExchange = ALONE) -> PolicyBatch:
    limits = TokenLimits(VOCABULARY, CONTEXT)
    return BatchReader(source=store, limits=limits, ranks=ranks).read(batch)


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


@pytest.mark.parametrize("change", [None, lambda d: bytes(len(d)), lambda d: d[:-1], lambda d: b""])
async def test_rollouts_that_are_gone_or_damaged_or_short_are_named_and_the_batch_is_not_read(
    change: Callable[[bytes], bytes] | None,
) -> None:
    store = MemoryStore()
    batch = await make_batch(store)
    key = sorted(store.objects)[1]
    data = store.objects.pop(key)
    if change is not None:
        store.objects[key] = change(data)
    with pytest.raises(DamagedRolloutsError, match=key) as refused:
        read_batch(store, batch)
    assert list(refused.value.rollouts) == ["g-1"]


def outside_the_vocabulary(rollout: rollout_pb2.Rollout) -> None:
    rollout.links[0].token_ids[0] = VOCABULARY


def of_another_version(rollout: rollout_pb2.Rollout) -> None:
    rollout.links[0].spans[0].sampled.number += 1


def without_a_span(rollout: rollout_pb2.Rollout) -> None:
    del rollout.links[0].spans[0]


def with_a_log_prob_less(rollout: rollout_pb2.Rollout) -> None:
    del rollout.links[0].sampler_logprobs[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (outside_the_vocabulary, "token_ids"),
        (of_another_version, "versions"),
        (without_a_span, "versions"),
        (with_a_log_prob_less, "lengths"),
    ],
)
async def test_tokens_of_the_right_digest_are_checked_as_those_of_records_are(
    change: Callable[[rollout_pb2.Rollout], None], word: str
) -> None:
    store = MemoryStore()
    batch = await make_batch(store)
    first = batch.stored[0]
    content = RolloutContent.FromString(first.content)
    rollout = rollout_pb2.Rollout.FromString(store.objects[content.tokens.key])
    change(rollout)
    lying = write_links(store, "contents/g/", rollout)
    content.tokens.CopyFrom(lying.tokens)
    stored = (first._replace(content=content.SerializeToString()), *batch.stored[1:])
    with pytest.raises(DamagedRolloutsError, match=word) as refused:
        read_batch(store, replace(batch, stored=stored))
    assert list(refused.value.rollouts) == ["g-0"]


async def test_a_rollout_that_was_damaged_on_its_way_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, calls = MemoryStore(), list[str]()
    batch = await make_batch(store)
    read = MemoryStore.get_range

    def get_range(self: MemoryStore, key: str, start: int, length: int) -> bytes:
        calls.append(key)
        return read(self, key, start, length) if calls.count(key) > 1 else bytes(length)

    monkeypatch.setattr(MemoryStore, "get_range", get_range)
    assert len(read_batch(store, batch).sequences) == 3


async def test_all_ranks_answer_alike_though_one_alone_cannot_read() -> None:
    stores = [MemoryStore() for _ in range(3)]
    batches = [await make_batch(store) for store in stores]
    for rank, place in ((0, 0), (2, 1)):
        del stores[rank].objects[sorted(stores[rank].objects)[place]]

    def read(ranks: RankExchange) -> dict[str, str]:
        with pytest.raises(DamagedRolloutsError) as refused:
            read_batch(stores[ranks.rank], batches[ranks.rank], ranks)
        return refused.value.rollouts

    found = run_thread_ranks(3, read)
    assert sorted(found[0]) == ["g-0", "g-1"]
    assert found[1:] == found[:-1]


async def test_no_rank_trains_a_batch_that_the_store_refuses_to_another() -> None:
    class Denying(MemoryStore):
        @override
        def get_range(self, key: str, start: int, length: int) -> bytes:
            raise DeniedError("no right to read")

    stores = [MemoryStore(), Denying()]
    batches = [await make_batch(store) for store in stores]

    def read(ranks: RankExchange) -> str:
        with pytest.raises(DeniedError) as refused:
            read_batch(stores[ranks.rank], batches[ranks.rank], ranks)
        return str(refused.value)

    assert run_thread_ranks(2, read) == ["no right to read"] * 2


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


@dataclass(slots=True)
class TimedRank:
    """A rank whose clock runs while it pauses; it notes how long peers wait for it."""

    ranks: RankExchange
    clock: Callable[[], float]
    answered_s: float = 0.0
    silences: list[float] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def gather_objects(self, value: T) -> list[T]:
        self.silences.append(self.clock() - self.answered_s)
        self.answered_s = self.clock()
        return self.ranks.gather_objects(value)


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_rank_whose_store_is_away_alone_is_never_silent_for_as_long_as_peers_wait(
    monkeypatch: pytest.MonkeyPatch, *, is_damaged: bool
) -> None:
    clocks = threading.local()

    class Away(MemoryStore):
        """Back after an hour of its reader."""

        @override
        def get_range(self, key: str, start: int, length: int) -> bytes:
            if now() < 3_600:
                raise StoreError("away")
            return MemoryStore.get_range(self, key, start, length)

    def now() -> float:
        return float(getattr(clocks, "now", 0.0))

    def pause(seconds: float) -> None:
        clocks.now = now() + seconds

    stores = [MemoryStore(), Away()]
    batches = [await make_batch(store) for store in stores]
    if is_damaged:
        del stores[0].objects[min(stores[0].objects)]
    monkeypatch.setattr(time, "sleep", pause)
    monkeypatch.setattr(time, "monotonic", now)
    monkeypatch.setattr(batch_reader, "ThreadPoolExecutor", OneThread)

    def read(ranks: RankExchange) -> tuple[list[float], int]:
        clocks.now = 0.0
        timed = TimedRank(ranks, now)
        try:
            num_read = len(read_batch(stores[ranks.rank], batches[ranks.rank], timed).sequences)
        except DamagedRolloutsError as error:
            num_read = -len(error.rollouts)
        return timed.silences, num_read

    found = run_thread_ranks(2, read)
    assert [num_read for _, num_read in found] == ([-1, -1] if is_damaged else [3, 3])
    assert sum(found[1][0]) >= 3_600
    assert max(found[1][0]) < 120


async def test_rows_are_never_built_from_a_batch_that_was_not_read() -> None:
    batch = await make_batch(MemoryStore())
    with pytest.raises(WrongStateError, match="3 rollouts"):
        policy_rows(batch, None)  # type: ignore[arg-type] # refused before it is asked
