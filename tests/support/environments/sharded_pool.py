"""A pool of several brokers and hosts in one process, over gRPC."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.support.environments.brokers import PATIENCE_S, pool, request

from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import GrpcHostClient
from etude.envserver.broker.service import BrokerService
from etude.envserver.broker.shards.peer_service import PeerService
from etude.envserver.broker.shards.peers import DEAD_AFTER_S, MOVE_S, Peers
from etude.envserver.broker.shards.router import ShardRouter
from etude.envserver.broker.shards.spills import Spills
from etude.envserver.drivers.in_memory import MemoryDriver, run_tests
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.heartbeat import HostHeartbeat
from etude.envserver.host.host import Host
from etude.envserver.host.service import HostService
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.v1 import broker_peers_pb2_grpc, environments_pb2, environments_pb2_grpc

Response = environments_pb2.LaunchBatchResponse


@dataclass(slots=True)
class Shard:
    """One broker and its server."""

    name: str
    router: ShardRouter
    spills: Spills
    server: rpc_server.Server
    target: str = ""

    @property
    def broker(self) -> Broker:
        return self.router.broker


@dataclass(slots=True)
class ShardedPool:
    """Brokers, hosts and one client channel for each broker."""

    folder: Path
    source: str
    """URI of the files of every environment."""
    slots: int = 4
    nodes: GrpcHostClient = field(default_factory=GrpcHostClient)
    shards: dict[str, Shard] = field(default_factory=dict)
    hosts: dict[str, HostHeartbeat] = field(default_factory=dict)
    _servers: list[rpc_server.Server] = field(default_factory=list)
    _channels: list[grpc.aio.Channel] = field(default_factory=list)

    async def add_broker(self, name: str) -> Shard:
        """A broker that listens, and knows the first one's address."""
        broker = Broker(pool(), self.nodes, shard=name, started_s=-REBUILD_S)
        seeds = next((each.target for each in self.shards.values()), "127.0.0.1:1")
        peers = Peers(name=name, addresses=BrokerAddresses(seeds), started_s=-MOVE_S)
        router = ShardRouter(broker, peers)
        router.connect()
        server = rpc_server.Server([])
        environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
            BrokerService(router), server.grpc_server
        )
        broker_peers_pb2_grpc.add_BrokerPeerServiceServicer_to_server(
            PeerService(router), server.grpc_server
        )
        await server.start()
        target = peers.target = f"127.0.0.1:{server.port}"
        shard = self.shards[name] = Shard(name, router, Spills(broker, peers), server, target)
        await self.exchange()
        return shard

    async def add_host(self, name: str) -> HostHeartbeat:
        """A host that one of the brokers knows."""
        scratch = self.folder / name
        driver = MemoryDriver(scratch / "leases", run_tests)
        driver.leases.mkdir(parents=True)
        host = Host(
            driver=driver,
            sources=WorkspaceSources(scratch),
            slots=self.slots,
            templates={"python"},
            refused={},
            endpoint="",
        )
        server = rpc_server.Server([])
        environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(
            HostService(host, Grader(driver, host.cache), name), server.grpc_server
        )
        await server.start()
        self._servers.append(server)
        host.endpoint = f"127.0.0.1:{server.port}"
        seeds = ",".join(each.target for each in self.shards.values())
        links = BrokerLinks(BrokerAddresses(seeds), name)
        self.hosts[name] = HostHeartbeat(host, links, name)
        await self.beat()
        return self.hosts[name]

    async def exchange(self) -> None:
        """Let all brokers hear of each other."""
        for _ in range(2):
            for shard in list(self.shards.values()):
                await shard.router.peers.exchange()

    async def beat(self, count: int = 2) -> None:
        """Heartbeats of every host."""
        for _ in range(count):
            for host in self.hosts.values():
                await host.send()
        await self.exchange()

    async def kill(self, name: str) -> Shard:
        """End a broker as a lost node does: its server answers nothing more."""
        shard = self.shards.pop(name)
        await shard.server.stop(0)
        return shard

    def bury(self, name: str, *, later_s: float = 0.0) -> None:
        """Let the others find that a broker is dead, some time later than they would."""
        for shard in self.shards.values():
            peers = shard.router.peers
            for peer in peers.living:
                if peer.name == name:
                    peer.heard_s -= 2 * DEAD_AFTER_S
            peers.remove_dead(now_s=time.monotonic())
            peers.lost_s -= later_s

    async def move(self, host: str, broker: str) -> None:
        """Let a host belong to another broker from now on, and its last one hear of it."""
        heartbeat = self.hosts[host]
        target = self.shards[broker].target
        assert await heartbeat._send_to(target, heartbeat.host.held_leases())

    def owner(self, host: str) -> list[str]:
        """Names of the brokers that know a host."""
        return [
            name
            for name, shard in self.shards.items()
            if shard.broker.ledger.hosts.get(host) is not None
        ]

    def stub(self, name: str) -> "environments_pb2_grpc.EnvBrokerServiceAsyncStub":
        """Client of one broker."""
        channel = channels.dial(self.shards[name].target)
        self._channels.append(channel)
        return environments_pb2_grpc.EnvBrokerServiceStub(channel)

    def request(self, key: str, count: int) -> environments_pb2.LaunchBatchRequest:
        asked = request(key, count)
        asked.workspace.uri = self.source
        return asked

    async def launch(
        self, name: str, key: str, count: int, *, is_repeated: bool = False
    ) -> list[Response]:
        """All outcomes of a batch that one broker is asked for; batches go where there is room."""
        asked = self.request(key, count)
        asked.is_repeated = is_repeated
        stop = asyncio.Event()
        shards = list(self.shards.values())
        spilling = [asyncio.create_task(shard.spills.run(stop)) for shard in shards]
        spilling += [asyncio.create_task(shard.router.peers.run(stop)) for shard in shards]
        try:
            async with asyncio.timeout(PATIENCE_S):
                return [each async for each in self.stub(name).LaunchBatch(asked)]
        finally:
            stop.set()
            await asyncio.gather(*spilling)

    async def renew(self, name: str, lease_ids: Sequence[str]) -> list[str]:
        """Leases that are gone, as one broker says."""
        answer = await self.stub(name).RenewLeases(
            environments_pb2.RenewLeasesRequest(lease_ids=lease_ids, ttl_seconds=60)
        )
        return list(answer.missing_lease_ids)

    async def stop(self) -> None:
        """End everything."""
        for host in self.hosts.values():
            await host.brokers.close()
        for shard in self.shards.values():
            await shard.router.peers.stop()
            await shard.server.stop(0)
        for channel in self._channels:
            await channel.close()
        await self.nodes.stop()
        for server in self._servers:
            await server.stop(0)
