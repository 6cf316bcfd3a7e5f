"""Records of any size: written in parts, whole or absent after a kill, never masked."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.blobs import MemoryStore
from etude.common.errors import CorruptError
from etude.common.weights import claim_epoch
from etude.trainer.controller.admission.groups import RolloutGroup, build_policy_batch
from etude.trainer.controller.journal import record_parts, segments, write_ahead_log
from etude.trainer.controller.journal.audit import audit_journal
from etude.trainer.controller.journal.record_parts import join_parts, prepare_record, split_data
from etude.trainer.controller.journal.write_ahead_log import Journal
from etude.v1.journal_pb2 import (
    JournalAdmit,
    JournalOpen,
    JournalPart,
    JournalRecord,
    JournalRollout,
)
from etude.v1.rewards_pb2 import RewardRecord
from etude.v1.rollout_pb2 import Link, Rollout

TOKENS = 1_500_000
"""Of each of two links; the record has 24 MB, a segment 16 MiB."""


def long_rollout() -> JournalRecord:
    rng = np.random.default_rng(0)
    link = Link(
        token_ids=rng.integers(1 << 14, 150_000, TOKENS).tolist(),
        loss_mask=bytes([0]) + bytes([1]) * (TOKENS - 1),
        sampler_logprobs=(-rng.random(TOKENS)).astype(np.float32).tolist(),
    )
    rollout = Rollout(rollout_id="g-0", group_id="g", index=0, links=[link, link])
    reward = RewardRecord(rollout_id="g-0", reward=1.0)
    return JournalRecord(rollout=JournalRollout(rollout=rollout, reward=reward))


async def write(store: MemoryStore, *records: JournalRecord) -> None:
    epoch = claim_epoch(store, holder="test", parent=None, reason="start")
    before = write_ahead_log.recover_records(store, run_uid="run", before_epoch=epoch, since=0)
    log = Journal(store, "run", epoch, before.last_sequence + 1)
    opening = JournalOpen(
        run_uid="run",
        epoch=epoch,
        previous_epoch=before.epoch,
        previous_sequence=before.last_sequence,
    )
    task = asyncio.create_task(log.run(), name="journal")
    log.append(JournalRecord(open=opening))
    for record in records:
        log.append(record)
    await log.wait_durable()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def read(store: MemoryStore) -> list[JournalRecord]:
    return write_ahead_log.recover_records(
        store, run_uid="run", before_epoch=1_000, since=0
    ).records


async def test_a_rollout_larger_than_a_segment_survives_a_kill_between_its_parts() -> None:
    admit = JournalRecord(admit=JournalAdmit(group_id="g", task_id="t"))
    rollout = long_rollout()
    whole = MemoryStore()
    await write(whole, admit, rollout)
    keys = sorted(key for key in whole.objects if key.startswith("journal/"))
    assert len(keys) >= 2
    expected = rollout.rollout.SerializeToString()
    for written in range(1, len(keys) + 1):
        # Segments are created in order, each at once: these are the states that a kill leaves.
        store = MemoryStore()
        store.objects.update(whole.objects)
        for key in keys[written:]:
            del store.objects[key]
        found = [r.rollout for r in read(store) if r.HasField("rollout")]
        assert len(found) == (written == len(keys))
        # The successor delivers it again, complete; it counts once.
        await write(store, *([] if found else [rollout]))
        [again] = [r.rollout for r in read(store) if r.HasField("rollout")]
        assert again.SerializeToString() == expected
        rollout.rollout.CopyFrom(again)
        audit = audit_journal(store.objects)
        assert (audit.findings, audit.accepted, audit.queued) == ([], 1, 1)
    group = RolloutGroup(
        group_id="g",
        phase="rl",
        position=0,
        task_id="t",
        seed=0,
        sequence=1,
        finished={0: rollout.rollout},
    )
    sequences = build_policy_batch([group]).sequences
    assert [int(each.loss_mask.sum()) for each in sequences] == [TOKENS - 1] * 2


@pytest.mark.parametrize("after", [5, 7, 9])
async def test_a_run_whose_records_are_all_in_parts_resumes_to_the_same_weights(
    make_world: Callable[..., Any],
    uninterrupted: str,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
) -> None:
    monkeypatch.setattr(record_parts, "PART_BYTES", 40)
    world = make_world()
    await world.crash(after=after)
    assert await world.train()
    assert world.digest == uninterrupted
    assert world.audit().findings == []


@given(sizes=st.lists(st.integers(0, 200), max_size=12), waits=st.sets(st.integers(0, 11)))
def test_records_of_any_size_are_read_back_in_the_order_of_their_sequences(
    sizes: list[int], waits: set[int]
) -> None:
    async def live(store: MemoryStore) -> list[int]:
        claim_epoch(store, holder="test", parent=None, reason="start")
        log = Journal(store, "run", 1, 1)
        task = asyncio.create_task(log.run(), name="journal")
        log.append(JournalRecord(open=JournalOpen(run_uid="run", epoch=1)))
        sequences = []
        for place, size in enumerate(sizes):
            record = JournalRecord(admit=JournalAdmit(group_id="g" * size, position=place))
            sequences.append(log.append(record))
            if place in waits:
                await log.wait_durable(sequences[-1])
                assert [r.sequence for r in read(store)][1:] == sequences
        await log.wait_durable()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return sequences

    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_parts, "PART_BYTES", 40)
        sequences = asyncio.run(live(store))
    found = read(store)[1:]
    assert [(r.sequence, len(r.admit.group_id)) for r in found] == list(
        zip(sequences, sizes, strict=True)
    )


async def test_parts_are_framed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[int]] = {}
    encode = segments.encode_record

    def encode_record(record: JournalRecord) -> bytes:
        kind = record.WhichOneof("body") or ""
        threads.setdefault(kind, set()).add(threading.get_ident())
        return encode(record)

    monkeypatch.setattr(segments, "encode_record", encode_record)
    store = MemoryStore()
    await write(store, long_rollout())
    assert threads["open"] == {threading.get_ident()}
    assert threading.get_ident() not in threads["part"]


@given(size=st.integers(0, 60), lost=st.integers(0, 12), part_bytes=st.integers(5, 30))
def test_parts_join_to_the_record_or_to_nothing(size: int, lost: int, part_bytes: int) -> None:
    record = JournalRecord(admit=JournalAdmit(group_id="g" * size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_parts, "PART_BYTES", part_bytes)
        data = prepare_record(record).data
        parts = [record] if data is None else [p.message(p.number + 1) for p in split_data(data)]
    assert (data is None) == (record.ByteSize() <= part_bytes)
    other = JournalRecord(sequence=99, admit=JournalAdmit(group_id="next"))
    kept = parts[: len(parts) - lost] if lost < len(parts) else []
    found = [r.admit.group_id for r in join_parts([*kept, other])]
    assert found == (["g" * size, "next"] if len(kept) == len(parts) else ["next"])
    assert [r.admit.group_id for r in join_parts([*parts[1:], other])] == ["next"]


def test_parts_that_are_no_record_are_refused() -> None:
    part = JournalPart(number=0, count=1, data=b"\xff\xff\xff")
    with pytest.raises(CorruptError, match="no record"):
        list(join_parts([JournalRecord(sequence=7, part=part)]))
