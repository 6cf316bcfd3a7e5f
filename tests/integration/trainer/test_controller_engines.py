"""Serving a version on engines that start late, lag, or cannot."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import pytest
from typing_extensions import override

from etude.common.errors import CorruptError, EtudeError, UnavailableError
from etude.common.serving import Server
from etude.common.weights import VersionId
from etude.trainer.controller.engines import Engines, EnginesLateError
from etude.v1 import weights_pb2, weights_pb2_grpc

VERSION = VersionId(2, 7)


@dataclass(slots=True)
class Replica(weights_pb2_grpc.WeightServiceServicer):
    """Takes its time to serve a version, or refuses it."""

    target: str = ""
    delay_s: float = 0.0
    refusals: int = 0
    error: EtudeError | None = None
    live: VersionId | None = None

    @override
    async def CommitVersion(
        self,
        request: weights_pb2.CommitVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.CommitVersionRequest, weights_pb2.CommitVersionResponse
        ],
    ) -> weights_pb2.CommitVersionResponse:
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "still loading")
        if self.error is not None:
            raise self.error
        await asyncio.sleep(self.delay_s)
        self.live = VersionId.from_proto(request.version)
        status = weights_pb2.WeightStatus(live=request.version, last_pause_seconds=0.004)
        return weights_pb2.CommitVersionResponse(status=status)

    @override
    async def GetWeightStatus(
        self,
        request: weights_pb2.GetWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.GetWeightStatusRequest, weights_pb2.GetWeightStatusResponse
        ],
    ) -> weights_pb2.GetWeightStatusResponse:
        return weights_pb2.GetWeightStatusResponse()

    @override
    async def WatchWeightStatus(
        self,
        request: weights_pb2.WatchWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.WatchWeightStatusRequest, weights_pb2.WatchWeightStatusResponse
        ],
    ) -> AsyncIterator[weights_pb2.WatchWeightStatusResponse]:
        yield weights_pb2.WatchWeightStatusResponse()


@pytest.fixture
async def replicas() -> AsyncIterator[list[Replica]]:
    servers, made = [], []
    for _ in range(2):
        replica, server = Replica(), Server(["weights"])
        weights_pb2_grpc.add_WeightServiceServicer_to_server(replica, server.grpc_server)
        await server.start()
        replica.target = f"127.0.0.1:{server.port}"
        servers.append(server)
        made.append(replica)
    yield made
    for server in servers:
        await server.stop(0.1)


Make = Callable[..., Engines]


@pytest.fixture
async def engines(replicas: list[Replica]) -> AsyncIterator[Make]:
    made: list[Engines] = []

    def make(*targets: str, timeout_s: float = 20.0, grace_s: float = 20.0) -> Engines:
        found = Engines(targets or [r.target for r in replicas], timeout_s, grace_s)
        made.append(found)
        return found

    yield make
    for each in made:
        await each.close()


async def test_every_replica_serves_the_version(replicas: list[Replica], engines: Make) -> None:
    serving = engines()
    await serving.commit(VERSION)
    assert [r.live for r in replicas] == [VERSION, VERSION]
    assert serving.rotation == tuple(r.target for r in replicas)
    assert serving.last_pause_s == pytest.approx(0.004)


async def test_an_engine_that_still_starts_is_waited_for(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[0].refusals = 6
    serving = engines(replicas[0].target)
    await serving.commit(VERSION)
    assert replicas[0].live == VERSION


async def test_a_replica_that_lags_leaves_rotation_and_comes_back(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[1].delay_s = 30.0
    serving = engines(grace_s=0.2)
    await serving.commit(VERSION)
    assert serving.rotation == (replicas[0].target,)
    replicas[1].delay_s = 0.0
    serving.grace_s = 20.0
    await serving.commit(VersionId(2, 8))
    assert len(serving.rotation) == 2


async def test_a_refusal_does_not_shorten_the_time_of_the_others(
    replicas: list[Replica], engines: Make, caplog: pytest.LogCaptureFixture
) -> None:
    replicas[0].error = CorruptError("its disk is bad")
    replicas[1].delay_s = 1.0
    serving = engines(grace_s=0.1)
    await serving.commit(VERSION)
    assert serving.rotation == (replicas[1].target,)
    assert "its disk is bad" in caplog.text


async def test_a_dead_replica_does_not_stop_the_others(
    replicas: list[Replica], engines: Make
) -> None:
    serving = engines("127.0.0.1:1", replicas[0].target, grace_s=0.5)
    await serving.commit(VERSION)
    assert serving.rotation == (replicas[0].target,)


async def test_no_engine_in_time_is_an_error_that_names_them(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[0].delay_s = 30.0
    with pytest.raises(EnginesLateError, match=replicas[0].target):
        await engines(replicas[0].target, timeout_s=0.3).commit(VERSION)


async def test_damaged_weights_are_reported_in_the_engines_words(
    replicas: list[Replica], engines: Make
) -> None:
    replicas[0].error = CorruptError("weights/full/2-7/0000.safetensors: content does not match")
    with pytest.raises(UnavailableError, match="content does not match"):
        await engines(replicas[0].target).commit(VERSION)
