"""The audit of trajectory logs finds every mutation of a legal history, and nothing in one."""

import asyncio
import copy
import math
import random
from collections.abc import Callable

import pytest

from etude.agent.completions import Completion, FinishReason
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.trajectory import LinkDraft, PolicySpan
from etude.common.blobs import MemoryStore
from etude.common.durable_log import encode_frame, encode_segment
from etude.common.weights import VersionId
from etude.trainer.controller.journal.audit import read_frames
from etude.trainer.controller.journal.trajectory_audit import audit_trajectories
from etude.trainer.rollouts.trajectories.log import TrajectoryLog
from etude.trainer.rollouts.trajectories.reader import TrajectoryReader
from etude.trainer.rollouts.trajectories.recorded_rollout import Place, RecordedRollout
from etude.trainer.rollouts.trajectories.recorder import RolloutRecorder
from etude.v1 import environments_pb2, rollout_pb2
from etude.v1 import trajectory_log_pb2 as pb

Records = list[pb.TrajectoryRecord]
Mutation = Callable[[Records, random.Random], str]
VERSION = VersionId(1, 1)
GROUP = "rl-000001"


def act(recorder: RolloutRecorder, draw: random.Random, turns: int) -> None:
    """Sample and record turns, each with a call."""
    for _ in range(turns):
        place = len(recorder.rollout.turns)
        ids = [draw.randrange(1000) for _ in range(draw.randint(1, 4))]
        spans = [PolicySpan(0, len(ids), VERSION, VERSION)]
        logprobs = [draw.choice([-0.5, -1.0, math.nan]) for _ in ids]
        completion = Completion(ids, logprobs, spans, FinishReason.STOP)
        recorder.add_turn(range(place), completion, 1.0)
        calls = [ToolCall(f"{place}.0", "run_terminal", "{}")]
        recorder.add_results(calls, [ToolOutcome(content=f"done {draw.random()}")], 0.5)


async def run_worker(store: MemoryStore, draw: random.Random, dispatch: int) -> None:
    """Continue a group for some turns, and die."""
    past = await TrajectoryReader(store, "run").read_group(GROUP)
    log = TrajectoryLog.of_run(store, "run")
    writing = asyncio.create_task(log.run())
    for index in range(2):
        name = f"{GROUP}-{index}"
        recorder = RolloutRecorder(
            log=log,
            rollout_id=name,
            group_id=GROUP,
            index=index,
            place=Place(1, dispatch, 0),
            rollout=past.get(name, RecordedRollout()),
            lost_s=lambda: 0.0,
            is_continued=dispatch > 0,
        )
        recorder.start(environments_pb2.Lease(lease_id=f"lease-{index}"))
        act(recorder, draw, draw.randint(2, 4))
    await log.wait_durable()
    writing.cancel()


async def make_history(seed: int) -> MemoryStore:
    """Logs of three workers, each of which went on from the one before."""
    store, draw = MemoryStore(), random.Random(seed)
    for dispatch in range(3):
        await run_worker(store, draw, dispatch)
    return store


def finish(rollout: RecordedRollout, name: str) -> rollout_pb2.Rollout:
    """The record that a journal has of a rollout that ends here."""
    link = LinkDraft.start([1, 2, 3])
    for turn in rollout.turns:
        ids = list(turn.token_ids)
        link.append_sampled(ids, list(turn.logprobs), [PolicySpan(0, len(ids), VERSION, VERSION)])
        link.append_read([7])
    made = rollout_pb2.Link(
        token_ids=link.token_ids,
        loss_mask=bytes(link.loss_mask),
        sampler_logprobs=link.sampler_logprobs,
    )
    return rollout_pb2.Rollout(rollout_id=name, group_id=GROUP, links=[made])


async def finished(store: MemoryStore) -> list[rollout_pb2.Rollout]:
    found = await TrajectoryReader(store, "run").read_group(GROUP)
    return [finish(rollout, name) for name, rollout in found.items()]


def rewrite(
    store: MemoryStore, mutate: Mutation, draw: random.Random
) -> tuple[dict[str, bytes], str]:
    """Mutate the log of the last worker; the other logs stay."""
    objects = {key: data for key, data in store.objects.items() if key.endswith(".wal")}
    logs = {
        key: [pb.TrajectoryRecord.FromString(data) for _, data in read_frames(objects[key])]
        for key in objects
    }
    key = max(logs, key=lambda each: logs[each][0].place.dispatch)
    records = logs[key]
    expected = mutate(records, draw)
    frames = [encode_frame(8, at, each.SerializeToString()) for at, each in enumerate(records, 1)]
    objects[key] = encode_segment("run", 1, first=1, frames=frames)
    return objects, expected


def lose_a_record(records: Records, draw: random.Random) -> str:
    ends = {max(at for at, r in enumerate(records) if r.index == index) for index in range(2)}
    del records[draw.choice([at for at in range(len(records)) if at not in ends])]
    return "I2"


def repeat_a_record(records: Records, draw: random.Random) -> str:
    place = draw.randrange(len(records))
    records.insert(place, copy.deepcopy(records[place]))
    return "I2"


def swap_two_records(records: Records, draw: random.Random) -> str:
    pairs = [at for at in range(len(records) - 1) if records[at].index == records[at + 1].index]
    place = draw.choice(pairs)
    records[place], records[place + 1] = records[place + 1], records[place]
    return "I2"


def change_a_carried_turn(records: Records, draw: random.Random) -> str:
    first = records[0]
    turns = [r for r in records[1 : 1 + first.start.carried] if r.HasField("turn")]
    draw.choice(turns).turn.token_ids[0] += 1
    return "I1"


def answer_a_call_twice(records: Records, draw: random.Random) -> str:
    answers = [r for r in records if r.HasField("results") and r.index == 1]
    one, other = draw.sample(answers, 2)
    one.results.calls[0].call_id = other.results.calls[0].call_id
    return "I2"


def lose_a_version(records: Records, draw: random.Random) -> str:
    turns = [r for r in records if r.HasField("turn")]
    del draw.choice(turns).turn.spans[:]
    return "I3"


MUTATIONS = [
    lose_a_record,
    repeat_a_record,
    swap_two_records,
    change_a_carried_turn,
    answer_a_call_twice,
    lose_a_version,
]


async def test_a_legal_history_has_no_findings() -> None:
    for seed in range(10):
        store = await make_history(seed)
        assert audit_trajectories(store.objects, await finished(store)) == []


@pytest.mark.parametrize("mutate", MUTATIONS)
async def test_the_audit_finds_every_kind_of_mutated_history(mutate: Mutation) -> None:
    for seed in range(10):
        objects, expected = rewrite(await make_history(seed), mutate, random.Random(seed))
        found = {finding.invariant for finding in audit_trajectories(objects)}
        assert expected in found, f"seed {seed}: {found}"


async def test_a_log_that_was_cut_behind_a_rollout_that_ended_has_no_findings() -> None:
    def change_nothing(records: Records, draw: random.Random) -> str:
        return ""

    objects, _ = rewrite(await make_history(1), change_nothing, random.Random(1))
    key, data = next(reversed(objects.items()))
    payloads = [payload for _, payload in read_frames(data)]
    frames = [encode_frame(8, at, payload) for at, payload in enumerate(payloads[3:], 4)]
    del objects[key]
    folder = key.rpartition("/")[0]
    objects[f"{folder}/{4:012d}.wal"] = encode_segment("run", 1, first=4, frames=frames)
    assert audit_trajectories(objects) == []


async def test_a_rollout_with_other_tokens_than_were_recorded_is_found() -> None:
    store = await make_history(1)
    rollouts = await finished(store)
    rollouts[0].links[0].token_ids[3] += 1
    [finding] = audit_trajectories(store.objects, rollouts)
    assert finding.invariant == "I1"


async def test_a_damaged_segment_is_named() -> None:
    store = await make_history(1)
    key = next(each for each in store.objects if each.endswith(".wal"))
    store.objects[key] = store.objects[key][:80] + b"x" + store.objects[key][81:]
    assert any(f.invariant == "log" and key in f.what for f in audit_trajectories(store.objects))
