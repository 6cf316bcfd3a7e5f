"""Learner actors store and fetch while they are in a step; all else keeps its order."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.common.api.storage import Storage
from etude.common.errors import StoreError
from etude.common.weights import VersionId
from etude.trainer import ray_backend
from etude.trainer.learner.config import LearnerConfig

START_S = 120
"""Ray on two cores that neighbours hold too."""


class Rank:
    """A rank whose step lasts until a save ended, and whose save lasts until an upload."""

    __module__ = "__main__"  # so that it travels to the actor by its code

    def __init__(self, config: LearnerConfig) -> None:
        self.rank = config.rank
        self.folder = config.model_folder
        self.threads: set[int] = set()
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(name)

    def open_rendezvous(self, host: str) -> str:
        self._called("open_rendezvous")
        return f"tcp://{host}:1"

    def load(self, rendezvous: str) -> None:
        self._called(f"load {rendezvous.rpartition(':')[2]}")

    def supervised_step(self, step: int) -> list[Any]:
        self._called(f"step {step}")
        for what in ("saved", "fetched"):
            self._wait_for(what if step else "")
        return [len(self.threads), self.calls]

    def _wait_for(self, what: str) -> None:
        while what and not (self.folder / f"{what}-{self.rank}").exists():
            time.sleep(0.01)

    def fetch_contents(self, references: Sequence[bytes], steps: int) -> None:
        (self.folder / f"fetched-{self.rank}").write_bytes(b"".join(references) + bytes([steps]))

    def copy_state(self, prefix: str) -> None:
        self._called(f"copy_state {prefix}")

    def save(self, prefix: str) -> list[str]:
        self._wait_for("uploaded")
        (self.folder / f"saved-{self.rank}").touch()
        return [f"{prefix}{self.rank}"]

    def upload(self, version: VersionId) -> None:
        if version.number == 7:
            raise StoreError(f"rank {self.rank}: the store is away")
        (self.folder / f"uploaded-{self.rank}").touch()


@pytest.fixture
async def learners(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[ray_backend.RayLearners]:
    """Two ranks behind the real door."""
    monkeypatch.setattr(ray_backend, "LearnerRank", Rank)
    ray_backend.start_ray(None)
    configs = [
        LearnerConfig(
            run="run",
            holder="test",
            model_folder=tmp_path,
            storage=Storage(uri=f"file://{tmp_path}/run"),
            rank=rank,
            world_size=2,
        )
        for rank in range(2)
    ]
    yield ray_backend.create_learners(configs, gpus_per_node=0)
    ray_backend.stop_ray()


async def test_neither_an_upload_nor_a_checkpoint_nor_a_fetch_waits_for_the_step_that_is_under_way(
    learners: ray_backend.RayLearners, tmp_path: Path
) -> None:
    async with asyncio.timeout(START_S):
        await learners.supervised_step(0)
        await learners.copy_state("checkpoint/")
        step = asyncio.create_task(learners.supervised_step(1))
        saving: asyncio.Task[Any] = asyncio.create_task(learners.save("checkpoint/"))
        with pytest.raises(StoreError, match="the store is away"):
            await learners.upload(VersionId(1, 7))
        assert not step.done()
        assert not saving.done()
        await learners.upload(VersionId(1, 1))
        assert await saving == ["checkpoint/0", "checkpoint/1"]
        assert not step.done()
        learners.fetch_contents([b"one", b"two"], 7)
        answer: Any = await step
    # Collective calls stay on one thread, as their libraries expect.
    assert answer == [
        1,
        ["open_rendezvous", "load 1", "step 0", "copy_state checkpoint/", "step 1"],
    ]
    fetched = [(tmp_path / f"fetched-{rank}").read_bytes() for rank in range(2)]
    assert fetched == [b"onetwo\x07"] * 2
