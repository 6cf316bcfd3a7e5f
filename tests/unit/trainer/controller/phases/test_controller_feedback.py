"""Phase Feedback: each window of users' rollouts is trained once, and published once."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.production_windows import (
    TENANT,
    draw_rollout,
    store_rollout,
    write_window,
)
from tests.support.trainer.store_outages import learner_of as learners_of
from typing_extensions import override

from etude.common.blobs import MemoryStore, Store, open_store
from etude.common.checkpoints import manifest as checkpoints
from etude.common.durable_log import log as durable_log
from etude.common.feedback import windows
from etude.common.weights import VersionId, accepted_chain
from etude.trainer.controller.phases import feedback
from etude.trainer.controller.phases.guards import MismatchError
from etude.trainer.controller.program import train
from etude.trainer.controller.run import Run, root_cause
from etude.v1 import run_pb2

MakeWorld = Callable[..., Any]
BASE = VersionId(1, 0)
"""Published before the first step of a run."""


def spec_of(folder: Path, *, max_steps: int = 4, **source: object) -> dict[str, Any]:
    return {
        "model": {"uri": "file:///model"},
        "storage": {"uri": "file:///run"},
        "weights": {"dtype": "Float32", "advanced": {"retainVersions": 2}},
        "checkpointing": {"keepLast": 2},
        "phases": [
            {
                "name": "users",
                "type": "Feedback",
                "maxSteps": max_steps,
                "seed": 3,
                "optimizer": {"learningRate": "1e-3"},
                "algorithm": {"name": "DrGRPO"},
                "feedback": {
                    "uri": folder.as_uri(),
                    "minRollouts": 4,
                    "stepsPerWindow": 2,
                    **source,
                },
            }
        ],
        "roles": {},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "feedback"


@pytest.fixture
def store(folder: Path) -> Store:
    return open_store(folder.as_uri())


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "POLL_S", 0.01)


def steps(world: Any) -> list[tuple[int, int]]:
    """Window and number of rollouts of each step."""
    return [(row["window"], row["rollouts"]) for row in world.rows("step")]


def ends(world: Any) -> list[tuple[int, str]]:
    return [(row["number"], row["ended_by"]) for row in world.rows("window")]


async def test_a_window_is_trained_in_its_steps_and_published_once_with_a_checkpoint(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    write_window(store, 1, BASE, rollouts=9)
    write_window(store, 2, BASE, rollouts=8)
    world = make_world(given=spec_of(folder))
    assert await world.train()
    assert steps(world) == [(1, 5), (1, 4), (2, 4), (2, 4)]
    assert [each.number for each in accepted_chain(world.store)] == [0, 1, 2]
    saved = checkpoints.complete_checkpoints(world.store, run="run")
    assert [(each.manifest.step, each.manifest.reason) for each in saved] == [
        *((0, "Window"), (2, "Window"), (4, "Final"))
    ]
    assert [each.manifest.policy_version for each in saved] == [0, 1, 2]
    audit = world.audit()
    assert audit.findings == []
    assert (audit.accepted, audit.trained, audit.queued) == (17, 17, 0)


async def test_the_learner_gets_the_advantages_of_the_window(
    make_world: MakeWorld, tmp_path: Path
) -> None:
    digests: list[str] = []
    for scale in (1.0, 1.0, 2.0):
        folder = tmp_path / str(len(digests))
        write_window(open_store(folder.as_uri()), 1, BASE, scale=scale)
        world = make_world(given=spec_of(folder, max_steps=2))
        assert await world.train()
        digests.append(world.digest)
    assert digests[0] == digests[1] != digests[2]


RECORDS = 1_000_000
"""More than any run has."""


class Dying(MemoryStore):
    """A store that dies with its controller after so many records of the journal."""

    records_left: int = RECORDS

    @override
    def create(self, key: str, data: bytes) -> None:
        if key.startswith("journal/"):
            if not self.records_left:
                raise ConnectionError("killed")
            self.records_left -= 1
        super().create(key, data)


async def test_a_controller_killed_after_any_record_is_followed_to_the_same_weights(
    make_world: MakeWorld, folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_log, "_ROOM", 1)  # each record is an object of its own
    monkeypatch.setattr(durable_log, "LINGER_S", 0.0)
    write_window(store, 1, BASE, rollouts=2, is_frozen=True, findings=("questions doubled",))
    write_window(store, 2, BASE, rollouts=3)
    write_window(store, 3, BASE, rollouts=2)
    spec = spec_of(folder, max_steps=3, minRollouts=2)
    whole = make_world(Dying(), given=spec)
    assert await whole.train()
    assert steps(whole) == [(2, 2), (2, 1), (3, 1)]

    async def train_after(alive: int) -> None:
        killed = Dying()
        killed.records_left = alive
        world = make_world(killed, given=spec)
        with pytest.raises(ExceptionGroup) as caught:
            await world.train()
        assert isinstance(root_cause(caught.value), ConnectionError)
        killed.records_left = RECORDS
        assert await world.train()
        assert world.digest == whole.digest
        audit = world.audit()
        assert audit.findings == []
        assert (audit.accepted, audit.trained, audit.queued) == (7, 4, 0)
        assert audit.dropped == {"frozen_window": 2, "surplus": 1}

    # From the record on that publishes the version which serves the windows.
    points = range(2, RECORDS - whole.store.records_left)
    assert len(points) > 20
    async with asyncio.TaskGroup() as group:
        for alive in points:
            group.create_task(train_after(alive), name=f"killed after {alive}")


REFUSED: dict[str, dict[str, Any]] = {
    "other_policy": {"run_uid": "another run"},
    "frozen_window": {"is_frozen": True, "findings": ("questions doubled",)},
    "expired": {"closed_ms": 1_000},
    "too_few_rollouts": {"rollouts": 3},
}


async def test_windows_that_must_not_be_trained_are_dropped_with_the_reason(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    for number, changed in enumerate(REFUSED.values(), start=1):
        write_window(store, number, BASE, **changed)
    store.put(windows.window_key(5), b"{}")
    write_window(store, 6, VersionId(1, 7))  # published by nobody
    write_window(store, 7, BASE)
    world = make_world(given=spec_of(folder, max_steps=2))
    assert await world.train()
    reasons = [*REFUSED, "damaged_window", "other_policy"]
    assert ends(world) == [*zip(range(1, 7), reasons, strict=True), (7, "")]
    assert steps(world) == [(7, 4), (7, 4)]
    audit = world.audit()
    assert audit.findings == []
    # Rollouts of another run are that run's to account for.
    assert audit.dropped == {
        "frozen_window": 8,
        "expired": 8,
        "too_few_rollouts": 3,
        "other_policy": 8,
    }
    [frozen] = [each for each in world.rows("event") if each["reason"] == "WindowFrozen"]
    assert "questions doubled" in frozen["message"]


async def test_a_window_two_releases_behind_is_stale(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    for number in (1, 2, 3):
        write_window(store, number, BASE)
    write_window(store, 4, VersionId(1, 1))
    world = make_world(given=spec_of(folder, max_steps=6))
    assert await world.train()
    assert ends(world) == [(1, ""), (2, ""), (3, "stale"), (4, "")]


async def test_rollouts_that_are_gone_or_damaged_are_masked_and_the_others_trained(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    draw = random.Random(1)
    drawn = [draw_rollout(draw, BASE) for _ in range(9)] + [draw_rollout(draw, VersionId(1, 3))]
    entries = [
        store_rollout(store, each, user="a" * 32, reward=1.0, advantage=0.5) for each in drawn
    ]
    gone, damaged = (windows.rollout_key(TENANT, e.user, e.rollout) for e in entries[:2])
    store.delete([gone])
    store.put(damaged, b"no rollout")
    write_window(store, 1, BASE, entries=entries)
    world = make_world(given=spec_of(folder, max_steps=2))
    assert await world.train()
    [row] = world.rows("window")
    assert row["masked"] == {"erased": 1, "damaged": 1, "invalid_span": 1}
    assert row["trained"] == 7
    audit = world.audit()
    assert audit.findings == []
    assert audit.dropped == row["masked"]


async def test_a_window_that_erasures_made_too_small_is_dropped(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    small = write_window(store, 1, BASE, rollouts=4)
    store.delete([windows.rollout_key(TENANT, e.user, e.rollout) for e in small.rollouts[:1]])
    write_window(store, 2, BASE)
    world = make_world(given=spec_of(folder, max_steps=2))
    assert await world.train()
    assert ends(world) == [(1, "too_few_rollouts"), (2, "")]
    assert world.audit().findings == []


async def test_the_rest_of_a_window_is_dropped_at_the_kl_budget(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    write_window(store, 1, BASE)
    write_window(store, 2, VersionId(1, 1))
    world = make_world(given=spec_of(folder, max_steps=2, klBudget="0.01"))

    def prepare(run: Run) -> None:
        learners_of(run).divergence = 0.02

    assert await world.train(prepare)
    assert ends(world) == [(1, "kl_budget"), (2, "surplus")]
    assert steps(world) == [(1, 4), (2, 4)]
    audit = world.audit()
    assert audit.findings == []
    assert audit.dropped == {"kl_budget": 4, "surplus": 4}
    assert [each.number for each in accepted_chain(world.store)] == [0, 1, 2]


async def test_a_waiting_run_says_which_window_it_waits_for_and_stops_when_told(
    make_world: MakeWorld, folder: Path
) -> None:
    world = make_world(given=spec_of(folder))
    run, sets, checkpoint = world.start()
    training = asyncio.create_task(train(run, sets, checkpoint=checkpoint))
    async with asyncio.timeout(30):
        async for report in run.reporter.reports.watch(epoch=1, after_sequence=0):
            if report.status.reason == "WaitingForWindow":
                break
    assert "window 1" in report.status.message
    run.commands.accept(
        run_pb2.CommandRequest(command_id="1", suspend=run_pb2.SuspendRun(checkpoint=True))
    )
    assert not await training
    write_window(open_store(folder.as_uri()), 1, BASE)
    write_window(open_store(folder.as_uri()), 2, BASE)
    assert await world.train()
    assert ends(world) == [(1, ""), (2, "")]


async def test_a_run_that_is_suspended_within_a_window_publishes_no_part_of_it(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    write_window(store, 1, BASE, rollouts=9)
    whole = make_world(given=spec_of(folder, max_steps=3, stepsPerWindow=3))
    assert await whole.train()
    world = make_world(given=spec_of(folder, max_steps=3, stepsPerWindow=3))

    def prepare(run: Run) -> None:
        learners_of(run).after_step = lambda: run.commands.accept(
            run_pb2.CommandRequest(command_id="1", suspend=run_pb2.SuspendRun(checkpoint=True))
        )

    assert not await world.train(prepare)
    assert len(steps(world)) == 1
    assert await world.train()
    assert world.digest == whole.digest
    assert [str(each) for each in accepted_chain(world.store)] == ["1.0", "2.1"]
    assert world.audit().findings == []


async def test_a_step_that_is_repeated_after_an_erasure_goes_without_the_erased(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    window = write_window(store, 1, BASE)
    world = make_world(given=spec_of(folder, max_steps=2))
    await world.crash(after=1)
    user = window.rollouts[0].user
    erased = [info.key for info in store.list(windows.rollout_prefix(TENANT, user))]
    store.delete(erased)
    assert await world.train()
    events = [each for each in world.rows("event") if each["reason"] == "WindowReplayed"]
    assert len(events) == 2
    assert all("erased" in each["message"] for each in events)
    assert sum(count for _, count in steps(world)) == 8 - len(erased)
    ledger = world.runs[-1].book.ledger
    assert (ledger.accepted, ledger.trained) == (8, 8 - len(erased))
    assert ledger.dropped == {"erased": len(erased)}
    audit = world.audit()
    assert audit.findings == []
    assert (audit.trained, audit.dropped) == (ledger.trained, ledger.dropped)
    assert world.audit().findings == []


async def test_no_token_of_a_user_gets_into_the_runs_store(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    draw = random.Random(5)
    rollouts = [draw_rollout(draw, BASE) for _ in range(4)]
    for each in rollouts:
        each.links[0].token_ids[0] = 250
        each.final_message = "my secret plan"
        each.calls.add(name="bash", arguments_json='{"command": "cat plan"}')
    entries = [
        store_rollout(store, each, user="a" * 32, reward=1.0, advantage=0.5) for each in rollouts
    ]
    write_window(store, 1, BASE, entries=entries)
    world = make_world(given=spec_of(folder, max_steps=2))
    assert await world.train()
    assert steps(world) == [(1, 2), (1, 2)]
    tokens = b"".join(bytes([each]) for each in rollouts[0].links[0].token_ids[1:])
    found = [
        key
        for key, data in world.store.objects.items()
        if b"secret plan" in data or b"cat plan" in data or tokens in data
    ]
    assert found == []
    assert not [key for key in world.store.objects if key.startswith("rollouts/")]


async def test_a_mismatch_of_serving_and_training_fails_the_run_before_it_publishes(
    make_world: MakeWorld, folder: Path, store: Store
) -> None:
    write_window(store, 1, BASE)
    world = make_world(given=spec_of(folder))

    def prepare(run: Run) -> None:
        learners_of(run).mismatch = 0.5

    with pytest.raises(ExceptionGroup) as caught:
        await world.train(prepare)
    assert isinstance(root_cause(caught.value), MismatchError)
    assert [each.number for each in accepted_chain(world.store)] == [0]
