"""Phase Feedback: each window of users' rollouts is trained once, and published once."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.production_windows import write_window
from typing_extensions import override

from etude.common.blobs import MemoryStore, Store, open_store
from etude.common.checkpoints import manifest as checkpoints
from etude.common.durable_log import log as durable_log
from etude.common.weights import VersionId, accepted_chain
from etude.trainer.controller.phases import feedback
from etude.trainer.controller.run import root_cause

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
