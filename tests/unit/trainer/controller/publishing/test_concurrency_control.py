"""A phase's token slots follow what its engines answer."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from typing_extensions import override

from etude.trainer.controller.publishing.concurrency import ConcurrencyControl
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.routing.concurrency import ConcurrencyBounds
from etude.v1 import inference_pb2, inference_pb2_grpc

Load = inference_pb2.GetEngineLoadResponse


@dataclass
class BusyEngine(inference_pb2_grpc.InferenceServiceServicer):
    """An engine that answers one load."""

    load: Load

    @override
    def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        ],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        raise NotImplementedError

    @override
    async def GetEngineInfo(
        self,
        request: inference_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineInfoRequest, inference_pb2.GetEngineInfoResponse
        ],
    ) -> inference_pb2.GetEngineInfoResponse:
        raise NotImplementedError

    @override
    async def GetEngineLoad(
        self,
        request: inference_pb2.GetEngineLoadRequest,
        context: grpc.aio.ServicerContext[inference_pb2.GetEngineLoadRequest, Load],
    ) -> Load:
        return self.load


async def serve(engine: BusyEngine) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_a_queue_at_one_engine_lowers_the_slots_of_the_routing_table() -> None:
    quiet, busy = BusyEngine(Load(running=40)), BusyEngine(Load(running=60, waiting=30))
    servers = [await serve(quiet), await serve(busy)]
    targets = tuple(target for _, target in servers)
    engines = Engines(targets, timeout_s=1.0, rotation=targets, token_slots=100)
    control = ConcurrencyControl(engines, ConcurrencyBounds(4, 200))
    before = engines.routing_table()
    try:
        await control.adapt()
        after = engines.routing_table()
        assert (before.token_slots, after.token_slots) == (100, 90)
        assert after.revision > before.revision
        busy.load = Load(running=60)
        await control.adapt()
        assert engines.token_slots == 91
    finally:
        for server, _ in servers:
            await server.stop(None)


async def test_preemptions_count_from_the_look_before() -> None:
    engine = BusyEngine(Load(running=10, preemptions=7))
    server, target = await serve(engine)
    engines = Engines((target,), timeout_s=1.0, rotation=(target,), token_slots=100)
    control = ConcurrencyControl(engines, ConcurrencyBounds(4, 200))
    try:
        for preemptions, expected in ((7, 100), (8, 90), (8, 90), (0, 90), (1, 81)):
            engine.load = Load(running=10, preemptions=preemptions)
            await control.adapt()
            assert engines.token_slots == expected
    finally:
        await server.stop(None)


@pytest.mark.parametrize("rotation", [(), ("127.0.0.1:1",)])
async def test_silent_engines_change_nothing(rotation: tuple[str, ...]) -> None:
    engines = Engines(rotation, timeout_s=1.0, rotation=rotation, token_slots=100)
    await ConcurrencyControl(engines, ConcurrencyBounds(4, 200)).adapt()
    assert engines.token_slots == 100
