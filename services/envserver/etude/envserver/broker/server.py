"""The broker's process: wiring, serving, draining; garbage collection."""

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from etude.common import telemetry
from etude.common.pools.pool_description import read_description
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.common.rpc import server as rpc_server
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import GrpcHostClient
from etude.envserver.broker.pool_updates import HostProblems, PoolUpdates
from etude.envserver.broker.service import BrokerService, PoolService
from etude.envserver.broker.shards.peer_service import PeerService
from etude.envserver.broker.shards.peers import Peers
from etude.envserver.broker.shards.router import ShardRouter
from etude.envserver.broker.shards.spills import Spills
from etude.envserver.settings import BrokerSettings
from etude.v1 import (
    broker_peers_pb2,
    broker_peers_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

EVERY_S = 0.25
"""The garbage of a quarter of a second is collected in a few milliseconds."""
QUIET_S, LATEST_S = 600.0, 3_600.0
"""Interval of full collections while the queue is empty, and at the latest."""


@dataclass(slots=True)
class GarbageCollector:
    """Collects new objects often, and all objects only while the broker is idle.

    A full collection takes 200 ms with 30,000 leases, which hold no reference cycles: each launch
    that arrives meanwhile waits for all of it.
    """

    is_quiet: Callable[[], bool]
    _full_s: float = field(default_factory=time.monotonic)

    async def run(self, stop: asyncio.Event) -> None:
        """Collect until told to stop."""
        while not stop.is_set():
            self.collect(now_s=time.monotonic())
            try:
                async with asyncio.timeout(EVERY_S):
                    await stop.wait()
            except TimeoutError:
                continue
        gc.unfreeze()

    def collect(self, *, now_s: float) -> bool:
        """Collect new objects, or everything if it is time; True in the latter case."""
        silence_s = now_s - self._full_s
        is_full = silence_s >= LATEST_S or (silence_s >= QUIET_S and self.is_quiet())
        if is_full:
            self._full_s = now_s
            gc.unfreeze()
        gc.collect()
        gc.freeze()
        return is_full


DRAIN_S = 5.0


_SERVICES = (
    environments_pb2.DESCRIPTOR.services_by_name["EnvBrokerService"].full_name,
    environments_pb2.DESCRIPTOR.services_by_name["PoolService"].full_name,
    broker_peers_pb2.DESCRIPTOR.services_by_name["BrokerPeerService"].full_name,
)


def _add_services(
    server: grpc.aio.Server, router: ShardRouter, updates: PoolUpdates, stop: asyncio.Event
) -> None:
    problems = HostProblems()
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
        BrokerService(router, updates, problems), server
    )
    environments_pb2_grpc.add_PoolServiceServicer_to_server(
        PoolService(router.broker, stop, updates, problems), server
    )
    broker_peers_pb2_grpc.add_BrokerPeerServiceServicer_to_server(PeerService(router), server)


async def serve(broker_settings: BrokerSettings) -> None:
    """Listen, grant leases until SIGTERM, let running calls end.

    Leases outlive their broker: the next one hears of them from the hosts.
    """
    settings = broker_settings.server
    description = read_description(broker_settings.pool_file)
    pool = description.pool
    provider = telemetry.setup_tracing(
        "etude-broker", otlp_endpoint=settings.otlp_endpoint, traces_file=settings.traces_file
    )
    hosts = GrpcHostClient()
    broker = Broker(pool.spec, hosts, pool.name, settings.pod)
    peers = Peers(name=settings.pod, addresses=broker_settings.addresses)
    router = ShardRouter(broker, peers)
    router.connect()
    server = rpc_server.Server(_SERVICES, settings.host, settings.port)
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    _add_services(server.grpc_server, router, PoolUpdates(broker, description), stop)
    with shutdown_signals(stop):
        await probes.start()
        await server.start()
        peers.target = broker_settings.advertise or f"{settings.host}:{server.port}"
        await server.set_ready()
        probes.ready = True
        async with asyncio.TaskGroup() as tasks:
            pauses = GarbageCollector(lambda: not len(broker.queue))
            tasks.create_task(pauses.run(stop), name="collect-garbage")
            tasks.create_task(peers.run(stop), name="exchange-loads")
            tasks.create_task(Spills(broker, peers).run(stop), name="spill")
            await broker.run(stop)
        probes.ready = False
        await server.stop(DRAIN_S)
        await asyncio.gather(hosts.stop(), peers.stop(), probes.stop())
    provider.shutdown()
