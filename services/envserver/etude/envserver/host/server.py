"""A node's process: driver, take-over, wiring, serve, drain."""

import asyncio
import logging
from contextlib import AsyncExitStack

from etude.common import channels, files, serving, telemetry
from etude.common.api.pool import StoreAccess
from etude.common.files import ResolvedPool
from etude.common.probes import Probes
from etude.envserver.drivers.base import Driver, DriverUnavailableError
from etude.envserver.drivers.selection import Place, selected
from etude.envserver.node.access_service import AccessService
from etude.envserver.node.admission import admission
from etude.envserver.node.ahead import Ahead, ahead
from etude.envserver.node.grading import Grader
from etude.envserver.node.heartbeat import MAX_BACKOFF_MS, Heartbeat
from etude.envserver.node.node import Node
from etude.envserver.node.searching import embedder
from etude.envserver.node.service import NodeService
from etude.envserver.node.shelf import Shelf
from etude.envserver.node.sources import Sources
from etude.envserver.node.state_service import StateService
from etude.envserver.settings import NodeSettings
from etude.v1 import (
    environment_access_pb2,
    environment_access_pb2_grpc,
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

log = logging.getLogger(__name__)

DRAIN_S = 20.0
"""For calls that run; leases and their files stay for the next process."""


async def serve(settings: NodeSettings) -> None:
    """Start the driver, continue a predecessor's leases, serve until SIGTERM."""
    pool = files.read_pool(settings.server.pool_file)
    settings.scratch.mkdir(parents=True, exist_ok=True)
    place = Place(scratch=settings.scratch, images=settings.images, secrets=settings.egress_secrets)
    driver = await selected(pool.spec, place)
    node = _node(pool, driver, settings)
    provider = telemetry.setup(
        "etude-node",
        otlp_endpoint=settings.server.otlp_endpoint,
        traces_file=settings.server.traces_file,
    )
    await driver.start()
    held, removed = await node.take_over()
    log.info("took over %d leases, removed %d folders", held, removed)
    try:
        kept = ahead(pool.spec, driver)
        await _serve(node, settings, _shelf(pool, driver), kept)
    finally:
        await driver.stop()
        provider.shutdown()


def _node(pool: ResolvedPool, driver: Driver, settings: NodeSettings) -> Node:
    admitted = admission(
        pool.spec, driver.name, driver.strength, allow_weak=settings.allow_weak_isolation
    )
    if not admitted.served:
        raise DriverUnavailableError(
            "; ".join(admitted.refused.values()),
            where="spec.templates",
            fix="set trust: Trusted, or start the node with ETUDE_ALLOW_WEAK_ISOLATION=1",
        )
    access = pool.spec.store or StoreAccess()
    return Node(
        driver=driver,
        sources=Sources(
            settings.scratch, access, embedder=embedder(pool.spec.search, settings.scratch, access)
        ),
        slots=pool.spec.slots_per_replica,
        templates=admitted.served,
        refused=admitted.refused,
    )


def _shelf(pool: ResolvedPool, driver: Driver) -> Shelf | None:
    uri = pool.spec.snapshots_uri
    if uri is None:
        return None
    return Shelf(files.store_for(uri, pool.spec.store or StoreAccess()), driver)


async def _serve(node: Node, settings: NodeSettings, shelf: Shelf | None, kept: Ahead) -> None:
    names = (
        environments_pb2.DESCRIPTOR.services_by_name["EnvNodeService"].full_name,
        environment_access_pb2.DESCRIPTOR.services_by_name["EnvAccessService"].full_name,
        environment_state_pb2.DESCRIPTOR.services_by_name["EnvStateService"].full_name,
    )
    server = serving.Server(names, settings.server.host, settings.server.port)
    service = NodeService(node, Grader(node.driver, node.cache, node.starts))
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(service, server.grpc_server)
    environment_access_pb2_grpc.add_EnvAccessServiceServicer_to_server(
        AccessService(node), server.grpc_server
    )
    environment_state_pb2_grpc.add_EnvStateServiceServicer_to_server(
        StateService(node, shelf), server.grpc_server
    )
    probes = Probes(settings.server.probe_port, settings.server.host)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        if shelf is not None:
            await stack.enter_async_context(shelf.swept(node.states.snapshots.quota.ttl_s))
        brokers = []
        for target in settings.broker_targets:
            channel = channels.dial(target, max_backoff_ms=MAX_BACKOFF_MS)
            await stack.enter_async_context(channel)
            brokers.append(environments_pb2_grpc.EnvBrokerServiceStub(channel))
        heartbeat = Heartbeat(node, brokers, settings.server.pod, ahead=kept)
        with serving.shutdown_signals(stop):
            await probes.start()
            await server.start()
            node.endpoint = settings.advertise or f"{settings.server.host}:{server.port}"
            await server.ready()
            probes.ready = True
            await heartbeat.run(stop)
            probes.ready = False
            service.draining = heartbeat.draining = True
            await heartbeat.beat()
            await server.stop(DRAIN_S)
            await probes.stop()
