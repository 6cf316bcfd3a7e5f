"""The controller moves real receivers over gRPC: together, or back from what they refuse."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.api.run.weights import Weights as WeightsSpec
from etude.common.blobs import MemoryStore
from etude.common.rpc.server import Server
from etude.common.weights import VersionId, WeightManifest
from etude.common.weights.tensors.schema import Schema, TensorSpec
from etude.inference.engine.fake import MemoryEngine, MemoryRanks
from etude.inference.engine.interface import EngineInfo
from etude.inference.service import SERVICES, WeightServicer
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager
from etude.trainer.controller.publishing.engines import Engines, VersionRefusedError
from etude.v1 import weights_pb2_grpc

SCHEMA = Schema(
    grid=2,
    tensors=(TensorSpec(name="a.q_proj.weight", dtype="BF16", shape=(64, 60), split="rows"),),
)
V = [VersionId(1, number) for number in range(9)]
REPLICAS = 3


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    return store


@pytest.fixture
def policy() -> TrainedPolicy:
    return TrainedPolicy(SCHEMA)


@pytest.fixture
def receivers(store: MemoryStore, tmp_path: Path) -> list[VersionFollower]:
    info = EngineInfo(model="tiny", vocab_size=100, max_model_len=32, max_concurrent=4)
    return [
        VersionFollower(
            stager=Stager(store, "uid-run", tmp_path / str(place)),
            engine=MemoryEngine(info, MemoryRanks(2)),
            status=ReplicaStatus(replica=f"inference-{place}"),
        )
        for place in range(REPLICAS)
    ]


@pytest.fixture
async def targets(receivers: list[VersionFollower]) -> AsyncIterator[list[str]]:
    """Every replica listens, and follows by itself."""
    servers, following = [], []
    for receiver in receivers:
        server = Server(SERVICES)
        weights_pb2_grpc.add_WeightServiceServicer_to_server(
            WeightServicer(receiver), server.grpc_server
        )
        await server.start()
        servers.append(server)
        following.append(asyncio.create_task(receiver.follow(), name="follow"))
    yield [f"127.0.0.1:{server.port}" for server in servers]
    for task in following:
        task.cancel()
    for server in servers:
        await server.stop(0.1)


def engines_of(targets: list[str], **advanced: object) -> Engines:
    return Engines.of(targets, WeightsSpec.model_validate({"advanced": advanced}))


def live(receivers: list[VersionFollower]) -> list[VersionId | None]:
    return [receiver.engine.live for receiver in receivers]


def lie(store: MemoryStore, manifest: WeightManifest) -> None:
    """Let a manifest promise a state that its changes do not lead to."""
    wrong = manifest.model_copy(update={"state": "0" * 32})
    store.objects[manifest.version.manifest_key] = wrong.to_bytes()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


async def test_replicas_that_follow_do_not_run_ahead_of_those_they_swap_with(
    receivers: list[VersionFollower], targets: list[str], policy: TrainedPolicy, store: MemoryStore
) -> None:
    serving = engines_of(targets, commit="Together", commitTimeoutSeconds=20)
    policy.publish(store, 0, complete=True)
    await serving.activate(V[0])
    for number in (1, 2):
        policy.step()
        policy.publish(store, number)
        for receiver in receivers:
            receiver.notify(V[number])
        await asyncio.sleep(0.3)
        assert live(receivers) == [V[number - 1]] * REPLICAS
        await serving.activate(V[number])
        assert live(receivers) == [V[number]] * REPLICAS
    assert [receiver.status.target for receiver in receivers] == [V[2]] * REPLICAS
    await serving.close()


async def test_a_version_whose_content_is_wrong_is_left_by_all_and_its_successor_served(
    receivers: list[VersionFollower], targets: list[str], policy: TrainedPolicy, store: MemoryStore
) -> None:
    serving = engines_of(targets)
    policy.publish(store, 0, complete=True)
    await serving.activate(V[0])
    policy.step()
    lie(store, policy.publish(store, 1))
    with pytest.raises(VersionRefusedError, match="its manifest says 0000"):
        await serving.activate(V[1])
    weights.quarantine(store, V[1], reason="refused")
    epoch = weights.claim_epoch(store, holder="t", parent=V[0], reason="rollback", after=1)
    await serving.roll_back(V[0])
    assert live(receivers) == [V[0]] * REPLICAS
    anew = VersionId(epoch, 2)
    policy.publish(store, 2, epoch=epoch, complete=True)
    await serving.activate(anew)
    assert live(receivers) == [anew] * REPLICAS
    states = [(await receiver.engine.swap.scan()).hex() for receiver in receivers]
    assert states == [weights.read_manifest(store, anew).state] * REPLICAS
    await serving.close()


async def test_a_replica_that_alone_finds_a_version_wrong_does_not_stop_the_others(
    receivers: list[VersionFollower], targets: list[str], policy: TrainedPolicy, store: MemoryStore
) -> None:
    serving = engines_of(targets, commit="Together", commitTimeoutSeconds=2)
    policy.publish(store, 0, complete=True)
    await serving.activate(V[0])
    engine = receivers[1].engine
    assert isinstance(engine, MemoryEngine)
    engine.ranks.words[0]["a.q_proj.weight"][:] ^= 0x55
    policy.step()
    policy.publish(store, 1)
    await serving.activate(V[1])
    assert serving.rotation == (targets[0], targets[2])
    assert [each.replica for each in weights.list_suspects(store)] == ["inference-1"]
    assert not receivers[1].status.is_ready
    await serving.close()


async def test_an_announced_version_is_taken_up_without_a_commit(
    receivers: list[VersionFollower], targets: list[str], policy: TrainedPolicy, store: MemoryStore
) -> None:
    serving = engines_of(targets)
    policy.publish(store, 0, complete=True)
    serving.announce(V[0])
    await until(lambda: live(receivers) == [V[0]] * REPLICAS)
    await serving.close()
