"""A pool with two brokers: each has its own runs, and a node serves both."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from tests.support.environments.brokers import PATIENCE_S, launched, pool, request

from etude.common.broker_shards import BrokerShard, shard_of
from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import GrpcHostClient
from etude.envserver.broker.service import BrokerService
from etude.envserver.host.grading import Grader
from etude.envserver.host.heartbeat import HostHeartbeat
from etude.envserver.host.host import Host
from etude.envserver.host.service import HostService
from etude.v1 import environments_pb2, environments_pb2_grpc

SLOTS = 4
RUNS = [next(f"run-{n}" for n in range(9) if shard_of(f"run-{n}", 2) == index) for index in (0, 1)]


@dataclass(slots=True)
class World:
    """Two brokers and their one node, over gRPC."""

    node: Host
    source: str
    nodes: GrpcHostClient = field(default_factory=GrpcHostClient)
    brokers: list[Broker] = field(default_factory=list)
    services: list[BrokerService] = field(default_factory=list)
    heartbeat: HostHeartbeat = field(init=False)

    def request(self, index: int, key: str, count: int) -> environments_pb2.LaunchBatchRequest:
        asked = request(key, count, run_id=RUNS[index])
        asked.workspace.uri = self.source
        return asked

    async def launch(
        self, index: int, key: str, count: int
    ) -> list[environments_pb2.LaunchBatchResponse]:
        return await launched(self.brokers[index], self.request(index, key, count))

    def fresh(self, index: int) -> Broker:
        return Broker(pool(), self.nodes, shard=BrokerShard(index, 2), started_s=-REBUILD_S)


@pytest.fixture
async def world(make_node: Callable[..., Host], source: str) -> AsyncIterator[World]:
    made = World(make_node(slots=SLOTS), source)
    node_server = rpc_server.Server([])
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(
        HostService(made.node, Grader(made.node.driver, made.node.cache)), node_server.grpc_server
    )
    await node_server.start()
    made.node.endpoint = f"127.0.0.1:{node_server.port}"
    servers, opened, stubs = [node_server], [], []
    for index in (0, 1):
        made.brokers.append(made.fresh(index))
        made.services.append(BrokerService(made.brokers[index]))
        server = rpc_server.Server([])
        environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
            made.services[index], server.grpc_server
        )
        await server.start()
        servers.append(server)
        opened.append(channels.dial(f"127.0.0.1:{server.port}"))
        stubs.append(environments_pb2_grpc.EnvBrokerServiceStub(opened[index]))
    made.heartbeat = HostHeartbeat(made.node, stubs, "n")
    await made.heartbeat.send()
    yield made
    for channel in opened:
        await channel.close()
    await made.nodes.stop()
    for server in servers:
        await server.stop(0)


async def test_each_broker_hears_of_its_own_leases_and_of_the_slots_that_are_left(
    world: World,
) -> None:
    await world.launch(0, "a", 3)
    await world.heartbeat.send()

    assert [len(broker.ledger.leases) for broker in world.brokers] == [3, 0]
    assert [broker.ledger.num_free for broker in world.brokers] == [1, 1]


async def test_a_slot_that_two_brokers_give_away_is_taken_once(world: World) -> None:
    await world.launch(0, "a", 3)
    late = world.brokers[1].launch(world.request(1, "b", 2))
    async with asyncio.timeout(PATIENCE_S), contextlib.aclosing(late) as outcomes:
        # Broker 1 had not heard of the three: the node takes one of its two and refuses the other.
        first = await anext(outcomes)
        assert len(world.node.held_leases()) == SLOTS
        assert list(world.brokers[1].ledger.leases) == [first.lease.lease_id]
        assert len(world.brokers[1].queue) == 1

        await world.brokers[0].release(list(world.brokers[0].ledger.leases))
        await world.heartbeat.send()
        second = await anext(outcomes)

    assert second.HasField("lease")
    assert len(world.node.held_leases()) == 2


async def test_a_broker_that_starts_anew_learns_its_own_leases_and_no_others(world: World) -> None:
    first = await world.launch(0, "a", 2)
    await world.launch(1, "b", 1)
    successor = world.fresh(0)

    world.services[0].broker = successor
    await world.heartbeat.send()
    world.brokers[0] = successor
    again = await world.launch(0, "a", 2)

    assert {o.lease.lease_id for o in again} == {o.lease.lease_id for o in first}
    assert len(world.brokers[1].ledger.leases) == 1
