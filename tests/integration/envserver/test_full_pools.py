"""A pool that is full, and clients that come back when it says."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from tests.support.environments.brokers import PATIENCE_S, lone_service, pool, request, started

from etude.common.errors import UnavailableError
from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.common.rpc.retry_after import retry_after_s
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.trainer.rollouts.leases import Leases
from etude.v1 import environments_pb2, environments_pb2_grpc


@dataclass(slots=True)
class Full:
    """A broker with one slot and a queue of one, behind gRPC."""

    broker: Broker
    stub: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"


@pytest.fixture
async def full() -> AsyncIterator[Full]:
    broker = started(MemoryHostClient(slots=1), spec=pool(max_queue=1))
    server = rpc_server.Server([])
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
        lone_service(broker), server.grpc_server
    )
    await server.start()
    async with channels.dial(f"127.0.0.1:{server.port}") as channel:
        yield Full(broker, environments_pb2_grpc.EnvBrokerServiceStub(channel))
    await server.stop(0)


async def launched(leases: Leases, key: str, queue_s: int = 60) -> environments_pb2.Lease | None:
    asked = request(key, queue_timeout_seconds=queue_s)
    async with asyncio.timeout(PATIENCE_S):
        (launch,) = [launch async for launch in leases.launch(asked)]
    return launch.lease


async def test_a_refusal_says_when_to_come_back(full: Full) -> None:
    leases = Leases(full.stub, outage_s=1)
    await launched(leases, "a")
    waiting = asyncio.create_task(launched(leases, "b"))
    await asyncio.sleep(0.2)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [each async for each in full.stub.LaunchBatch(request("c"))]

    later_s = retry_after_s(caught.value)
    assert later_s is not None
    assert 0 < later_s <= 60
    waiting.cancel()


async def test_a_rollout_worker_that_was_sent_away_gets_its_environment_in_the_end(
    full: Full,
) -> None:
    leases = Leases(full.stub, outage_s=1)
    first = await launched(leases, "a")
    assert first is not None
    others = [asyncio.create_task(launched(leases, key)) for key in "bc"]
    await asyncio.sleep(0.2)
    assert len(full.broker.queue) == 1

    for _ in others:
        (held,) = full.broker.ledger.leases
        await full.broker.release([held])
        await asyncio.wait(others, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        others = [other for other in others if not other.done() or other.result() is None]

    assert not others


async def test_a_rollout_worker_does_not_come_back_for_ever(full: Full) -> None:
    leases = Leases(full.stub, outage_s=1)
    await launched(leases, "a")
    waiting = asyncio.create_task(launched(leases, "b"))
    await asyncio.sleep(0.2)

    with pytest.raises(UnavailableError, match="environments wait already"):
        await launched(leases, "c", queue_s=1)
    waiting.cancel()
