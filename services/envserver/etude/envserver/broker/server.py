"""The broker's process: wiring, serving, draining; garbage collection."""

import asyncio

from etude.common import files, serving, telemetry
from etude.common.probes import Probes
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.nodes import GrpcNodes
from etude.envserver.broker.pauses import Pauses
from etude.envserver.broker.service import BrokerService, PoolService
from etude.envserver.settings import BrokerSettings
from etude.v1 import environments_pb2, environments_pb2_grpc

DRAIN_S = 5.0


async def serve(broker_settings: BrokerSettings) -> None:
    """Listen, grant leases until SIGTERM, let running calls end.

    Leases outlive their broker: the next one hears of them from the hosts.
    """
    settings = broker_settings.server
    pool = files.read_pool(settings.pool_file)
    provider = telemetry.setup(
        "etude-broker", otlp_endpoint=settings.otlp_endpoint, traces_file=settings.traces_file
    )
    nodes = GrpcNodes()
    broker = Broker(pool.spec, nodes, pool.name, broker_settings.shard)
    services = environments_pb2.DESCRIPTOR.services_by_name
    names = [services[name].full_name for name in ("EnvBrokerService", "PoolService")]
    server = serving.Server(names, settings.host, settings.port)
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
        BrokerService(broker), server.grpc_server
    )
    environments_pb2_grpc.add_PoolServiceServicer_to_server(
        PoolService(broker, stop), server.grpc_server
    )
    with serving.shutdown_signals(stop):
        await probes.start()
        await server.start()
        await server.ready()
        probes.ready = True
        async with asyncio.TaskGroup() as tasks:
            pauses = Pauses(lambda: not len(broker.queue))
            tasks.create_task(pauses.run(stop), name="collect-garbage")
            await broker.run(stop)
        probes.ready = False
        await server.stop(DRAIN_S)
        await nodes.stop()
        await probes.stop()
    provider.shutdown()
