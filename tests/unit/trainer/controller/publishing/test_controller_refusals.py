"""A whole run over real receivers: a version that is damaged in the store is left by everybody."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.rpc.server import Server
from etude.common.weights import VersionId
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.service import SERVICES, WeightServicer
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.run import Run
from etude.v1 import weights_pb2_grpc

MakeWorld = Callable[..., Any]


@dataclass
class Damaging(Engines):
    """Finds a payload damaged when it comes to the version that is to be refused."""

    store: MemoryStore = field(default_factory=MemoryStore)
    countdown: int = 3
    damaged: list[VersionId] = field(default_factory=list)

    @override
    async def activate(self, version: VersionId) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            manifest = weights.read_manifest(self.store, version)
            for item in manifest.objects:
                data = bytearray(self.store.objects[item.key])
                data[0] ^= 1
                self.store.objects[item.key] = bytes(data)
            self.damaged.append(version)
        await Engines.activate(self, version)


@asynccontextmanager
async def listening(receivers: list[VersionFollower]) -> AsyncIterator[list[str]]:
    servers = []
    for receiver in receivers:
        server = Server(SERVICES)
        weights_pb2_grpc.add_WeightServiceServicer_to_server(
            WeightServicer(receiver), server.grpc_server
        )
        await server.start()
        servers.append(server)
    yield [f"127.0.0.1:{server.port}" for server in servers]
    for server in servers:
        await server.stop(0.1)


@pytest.mark.parametrize("together_s", [None, 20.0])
async def test_a_run_goes_on_from_the_version_before_one_that_its_engines_refuse(
    make_world: MakeWorld, uninterrupted: str, tmp_path: Path, together_s: float | None
) -> None:
    world = make_world()
    info = EngineInfo(model="tiny", vocab_size=100, max_model_len=32, max_concurrent=4)
    receivers = [
        VersionFollower(
            stager=Stager(world.store, "run", tmp_path / str(place)),
            engine=MemoryEngine(info, MemoryRanks(1)),
            status=ReplicaStatus(replica=f"inference-{place}"),
        )
        for place in range(2)
    ]
    made: list[Damaging] = []
    async with listening(receivers) as targets:

        def prepare(run: Run) -> None:
            found = Damaging(targets, timeout_s=30.0, together_s=together_s)
            found.store = world.store
            run.publishing.engines = found
            made.append(found)

        assert await asyncio.wait_for(world.train(prepare), 60)
        (engines,) = made
        (damaged,) = engines.damaged
        assert weights.list_quarantined(world.store) == {damaged}
        newest = weights.newest_version(world.store)
        assert newest is not None
        assert newest.epoch == 2
        run = world.runs[0]
        assert isinstance(run.learners, SimulatedLearners)
        for receiver in receivers:
            assert receiver.engine.live == VersionId(*run.progress.cursor.policy)
            assert isinstance(receiver.engine, MemoryEngine)
            (words,) = receiver.engine.ranks.words[0].values()
            assert words.tobytes() == run.learners.words.tobytes()
        await engines.close()
    assert world.digest == uninterrupted
    assert world.audit(max_staleness=0).findings == []
