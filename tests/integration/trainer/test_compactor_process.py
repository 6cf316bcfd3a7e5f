"""The compactor as an actor: works in its own process, and survives the death of that process."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import Store, open_store
from etude.common.errors import FencedError
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.trainer import ray_backend
from etude.trainer.compactor.compactor import CompactorConfig
from etude.trainer.controller.publishing.compaction import CompactionMonitor

SCHEMA = Schema(grid=1, tensors=(TensorSpec(name="w", dtype="BF16", shape=(64, 64), split="rows"),))
START_S = 120
"""Ray and numba on two cores that neighbours hold too."""


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = open_store(f"file://{tmp_path}/run")
    weights.claim_epoch(found, holder="t", parent=None, reason="start")
    return found


@pytest.fixture
def upkeep(tmp_path: Path) -> Iterator[CompactionMonitor]:
    ray_backend.start_ray(None)
    config = CompactorConfig(
        run="uid-run",
        epoch=1,
        storage=Storage(uri=f"file://{tmp_path}/run"),
        folder=tmp_path / "compactor",
        weights=Weights.model_validate({"keyframeEverySteps": 2}),
    )
    yield CompactionMonitor(
        client=ray_backend.create_compactor(config), epoch=1, versions=2, first=0
    )
    ray_backend.stop_ray()


def keyframes(store: Store) -> list[int]:
    found = take_listing(store).keyframes
    return sorted(version.number for version, each in found.items() if each.record is not None)


async def test_a_compactor_that_is_killed_is_started_again_and_goes_on(
    store: Store, upkeep: CompactionMonitor
) -> None:
    policy = TrainedPolicy(SCHEMA)
    for number in range(3):
        policy.publish(store, number, complete=number == 0)
        policy.step(0.01)
    async with asyncio.timeout(START_S):
        assert await upkeep.run_round()
        assert keyframes(store) == [2]
        assert isinstance(upkeep.client, ray_backend.RayCompactor)
        pid = _pid(upkeep.client.actor)
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        for number in (3, 4):
            policy.publish(store, number)
            policy.step(0.01)
        while not await upkeep.run_round():
            assert upkeep.problem
            await asyncio.sleep(0.5)
        assert keyframes(store) == [2, 4]
        assert _pid(upkeep.client.actor) != pid
        weights.claim_epoch(store, holder="t2", parent=VersionId(1, 4), reason="takeover")
        with pytest.raises(FencedError):
            await upkeep.run_round()


def _pid(actor: ray_backend.Actor) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid
