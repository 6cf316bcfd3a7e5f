"""Objects that a dead worker left are deleted, and nothing that a record ever named."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from etude.common.blobs import MemoryStore
from etude.common.errors import StoreError
from etude.common.weights import claim_epoch
from etude.trainer.contents.objects import write_links, write_object
from etude.trainer.controller.admission.content_collector import ContentCollector
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.journal.write_ahead_log import Journal
from etude.v1 import journal_pb2, rollout_pb2


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def make_group(store: MemoryStore) -> RolloutGroup:
    group = RolloutGroup(group_id="rl-1", phase="rl", position=1, task_id="t", seed=1, sequence=1)
    record = journal_pb2.JournalRollout()
    record.content.tokens.CopyFrom(write_object(store, "contents/rl-1/rl-1-0", b"accepted"))
    group.finished[0] = record
    group.spent["rl-1-1"] = 1
    for stem in ("rl-1/rl-1-0", "rl-1/rl-1-1", "rl-1/rl-1-10", "rl-10/rl-10-0"):
        write_object(store, f"contents/{stem}", b"of a dead worker")
    return group


def open_collector(store: MemoryStore, *, is_restored: bool = False) -> ContentCollector:
    """A collector whose journal, which is in a store of its own, has nothing to write."""
    return ContentCollector(store, Journal(MemoryStore(), "run", 1, 1), is_restored=is_restored)


def left(store: MemoryStore) -> list[str]:
    return sorted(key.rsplit(".", 1)[0].removeprefix("contents/") for key in store.objects)


async def test_what_no_record_names_goes_once_a_repeated_group_is_complete(
    store: MemoryStore,
) -> None:
    group, collector = make_group(store), open_collector(store)
    await collector.collect(group, after=0)
    assert len(left(store)) == 5, "its only attempt is its records'"
    collector.note_repeated("rl-1")
    await collector.collect(group, after=0)
    assert left(store) == ["rl-1/rl-1-0", "rl-1/rl-1-1", "rl-10/rl-10-0"]
    assert group.finished[0].content.tokens.key in store.objects


async def test_recorded_experts_that_no_link_names_go_too(store: MemoryStore) -> None:
    group, collector = make_group(store), open_collector(store)
    rollout = rollout_pb2.Rollout(rollout_id="rl-1-0")
    link = rollout.links.add(token_ids=[1, 2], loss_mask=b"\0\1", sampler_logprobs=[0, -1])
    link.routes.key = "routes/rl-1/rl-1-0.0.accepted"
    group.finished[0].rollout.rollout_id = "rl-1-0"
    group.finished[0].content.CopyFrom(write_links(store, "contents/rl-1/", rollout))
    stems = ("rl-1/rl-1-0.0.accepted", "rl-1/rl-1-0.0.dead", "rl-1/rl-1-1.0.spent", "rl-10/x")
    for stem in stems:
        store.put(f"routes/{stem}", b"experts")
    collector.note_repeated("rl-1")
    await collector.collect(group, after=0)
    found = [key.removeprefix("routes/") for key in store.objects if key.startswith("routes/")]
    assert sorted(found) == ["rl-1/rl-1-0.0.accepted", "rl-1/rl-1-1.0.spent", "rl-10/x"]


async def test_a_restored_run_keeps_what_the_branch_that_it_left_may_name(
    store: MemoryStore,
) -> None:
    collector = open_collector(store, is_restored=True)
    collector.note_repeated("rl-1")
    await collector.collect(make_group(store), after=0)
    assert len(left(store)) == 5


async def test_a_controller_that_lost_its_run_deletes_nothing(store: MemoryStore) -> None:
    group, collector = make_group(store), open_collector(store)
    for holder in ("this", "its successor"):
        claim_epoch(collector.journal.store, holder=holder, parent=None, reason="start")
    collector.note_repeated("rl-1")
    await collector.collect(group, after=0)
    assert len(left(store)) == 5


async def test_nothing_is_deleted_before_the_last_record_is_durable(store: MemoryStore) -> None:
    group, collector = make_group(store), open_collector(store)
    collector.note_repeated("rl-1")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(collector.collect(group, after=1), 0.1)
    assert len(left(store)) == 5


async def test_a_store_that_is_away_stops_nothing(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("away")

    group, collector = make_group(store), open_collector(store)
    monkeypatch.setattr(MemoryStore, "list", fail)
    collector.note_repeated("rl-1")
    await collector.collect(group, after=0)
    assert len(left(store)) == 5


async def test_after_crashes_the_store_has_the_tokens_of_the_journal_and_no_others(
    make_world: Callable[..., Any],
) -> None:
    world = make_world()
    await world.crash(after=1)
    for key in ("eval-held-out-0-sampled-0/of-a-killed-controller.ab", "x/y"):
        world.store.put(f"contents-of-evaluations/{key}", b"tokens")
    assert await world.train()
    records = [
        each.rollout
        for each in _records(world)
        if each.WhichOneof("body") == "rollout" and each.rollout.HasField("content")
    ]
    assert records
    named = {record.content.tokens.key for record in records}
    assert {key for key in world.store.objects if key.startswith("contents/")} == named
    assert not [key for key in world.store.objects if key.startswith("contents-of-evaluations/")]


def _records(world: Any) -> list[journal_pb2.JournalRecord]:

    return write_ahead_log.recover_records(
        world.store, run_uid="run", before_epoch=99, since=0
    ).records
