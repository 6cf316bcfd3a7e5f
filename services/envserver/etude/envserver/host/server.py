"""The host's process: driver, isolation check, adoption of leases, wiring, serving, draining."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import NamedTuple

from etude.common import stores, telemetry
from etude.common.api.pool.spec import EnvPoolSpec, IsolationLevel, Slot, Trust
from etude.common.api.storage import StoreAccess
from etude.common.pools.pool_description import PoolDescription
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.common.role_inputs import ResolvedPool
from etude.common.rpc import server as rpc_server
from etude.envserver.drivers.base import Driver, DriverUnavailableError, IsolationStrength
from etude.envserver.drivers.selection import DriverFolders, select_driver
from etude.envserver.drivers.vm.start import start_scheduler
from etude.envserver.host.access_service import AccessService
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.heartbeat import HostHeartbeat
from etude.envserver.host.host import Host
from etude.envserver.host.pool_following import PoolFollower
from etude.envserver.host.pool_start import (
    first_description,
    report_problem,
    restart_process,
)
from etude.envserver.host.service import HostService
from etude.envserver.host.snapshots.snapshot_store import SnapshotStore
from etude.envserver.host.snapshots.state_service import StateService
from etude.envserver.host.task_images import TaskImages
from etude.envserver.host.warm_minimum import read_minimum
from etude.envserver.host.workspace_sources import WorkspaceSources, load_embedder
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.pull.pulled_image import ImagePuller
from etude.envserver.images.pull.registry_access import RegistryAccess
from etude.envserver.settings import HostSettings
from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderLimits
from etude.envserver.storage.store_reads import DirectReads, StoreReads
from etude.v1 import (
    environment_access_pb2,
    environment_access_pb2_grpc,
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

_MEETS = {
    IsolationLevel.PROCESS: frozenset(IsolationStrength),
    IsolationLevel.SANDBOX: frozenset({IsolationStrength.MODERATE, IsolationStrength.STRONG}),
    IsolationLevel.MICRO_VM: frozenset({IsolationStrength.STRONG}),
}


class IsolationAdmission(NamedTuple):
    """Templates of a pool that the driver may run, and those that it may not."""

    served: frozenset[str]
    refused: Mapping[str, str]
    """Reason by template."""


def check_isolation(
    spec: EnvPoolSpec, driver: str, strength: IsolationStrength, *, allow_weak: bool
) -> IsolationAdmission:
    """Check which templates of a pool may run in this driver's isolation.

    Raises:
        DriverUnavailableError: the pool requires stronger isolation.
    """
    minimum = spec.isolation.minimum
    if strength not in _MEETS[minimum]:
        raise DriverUnavailableError(
            f"the pool wants isolation {minimum} or stronger; driver {driver} is {strength}",
            where="spec.isolation.minimum",
            fix=f"set it to {IsolationLevel.PROCESS} for templates that you trust as your own code",
        )
    refused = {
        template.name: (
            f"template {template.name!r} is {template.trust} and driver {driver} is {strength}:"
            " declare it Trusted, or allow weak isolation on this host"
        )
        for template in spec.templates
        if template.trust is Trust.UNTRUSTED
        and strength is IsolationStrength.WEAK
        and not allow_weak
    }
    names = {template.name for template in spec.templates}
    return IsolationAdmission(frozenset(names - refused.keys()), refused)


log = logging.getLogger(__name__)

IMAGES_SHARE = 4
"""Divisor of a host's memory that gives what templates of tasks' images may take together."""
DRAIN_S = 20.0
"""Grace for running calls; leases and their files stay for the next process."""


async def serve(settings: HostSettings) -> None:
    """Start the driver, continue a predecessor's leases, serve until SIGTERM.

    A host that the brokers describe the pool to probes this machine again and again until its
    driver can be had; one with a file exits, for the operator to see.

    Raises:
        DriverUnavailableError: this machine cannot meet the pool's requirements.
    """
    async with AsyncExitStack() as stack:
        brokers = BrokerLinks(settings.brokers, settings.server.pod)
        stack.push_async_callback(brokers.close)
        description = await first_description(settings, brokers)
        try:
            starts_again = await _run(settings, description, brokers)
        except DriverUnavailableError as error:
            if settings.pool_file is not None:
                raise
            starts_again = await report_problem(error, settings, description.revision, brokers)
    if starts_again:
        restart_process()


async def _run(settings: HostSettings, description: PoolDescription, brokers: BrokerLinks) -> bool:
    """Run a host with this spec; True when it is time to start again with another one."""
    pool = description.pool
    settings.scratch.mkdir(parents=True, exist_ok=True)
    reads = _store_reads(pool.spec, settings, brokers)
    place = DriverFolders(
        scratch=settings.scratch,
        images=settings.images,
        secrets=settings.egress_secrets,
        reads=reads,
    )
    driver = await select_driver(pool.spec, place)
    host = await _build_host(pool, driver, settings, reads)
    provider = telemetry.setup_tracing(
        "etude-node",
        otlp_endpoint=settings.server.otlp_endpoint,
        traces_file=settings.server.traces_file,
    )
    await driver.start()
    held, removed = await host.take_over()
    log.info("adopted %d leases, removed %d folders", held, removed)
    try:
        heartbeat = HostHeartbeat(
            host,
            brokers,
            settings.server.pod,
            minimum=read_minimum(pool.spec, driver),
            follower=PoolFollower(description, driver),
        )
        await _serve(heartbeat, settings, _snapshot_store(pool, driver))
        return heartbeat.is_due_to_restart
    finally:
        if host.images is not None:
            await host.images.close()
        await driver.stop()
        provider.shutdown()


def _store_reads(spec: EnvPoolSpec, settings: HostSettings, brokers: BrokerLinks) -> StoreReads:
    """Reads of the pool's store: by grants where its Secret is not with this host."""
    has_credentials = settings.pool_file is not None
    if has_credentials or spec.store is None or spec.store.secret_ref is None:
        return DirectReads(spec.store or StoreAccess())
    from etude.envserver.read_grants.granted_reads import (  # noqa: PLC0415 - loads urllib3
        BrokerGrants,
        GrantedReads,
    )

    return GrantedReads(BrokerGrants(brokers, asyncio.get_running_loop()).ask)


async def _build_host(
    pool: ResolvedPool, driver: Driver, settings: HostSettings, reads: StoreReads
) -> Host:
    admitted = check_isolation(
        pool.spec, driver.name, driver.strength, allow_weak=settings.allow_weak_isolation
    )
    if not admitted.served:
        raise DriverUnavailableError(
            "; ".join(admitted.refused.values()),
            where="spec.templates",
            fix="set trust: Trusted, or start the host with ETUDE_ALLOW_WEAK_ISOLATION=1",
        )
    embedder = await asyncio.to_thread(load_embedder, pool.spec.search, settings.scratch, reads)
    return Host(
        images=_task_images(pool.spec, driver, settings, reads),
        driver=driver,
        sources=WorkspaceSources(
            settings.scratch,
            reads,
            embedder=embedder,
            search_service=pool.spec.search.service or "",
        ),
        slots=pool.spec.slots_per_replica,
        templates=admitted.served,
        refused=admitted.refused,
        change_limits=_change_limits(pool.spec.slot),
    )


def _change_limits(slot: Slot) -> FolderLimits:
    return FolderLimits(
        max_files=slot.change_files or folders.DIFF.max_files,
        max_bytes=folders.DIFF.max_bytes if slot.change_mib is None else slot.change_mib << 20,
    )


def _task_images(
    spec: EnvPoolSpec, driver: Driver, settings: HostSettings, reads: StoreReads
) -> TaskImages | None:
    if spec.images is None:
        return None
    mirrors = dict[str, tuple[str, ...]]()
    for each in spec.images.mirrors:
        mirrors[each.registry] = (*mirrors.get(each.registry, ()), each.mirror)
    puller = ImagePuller(
        cache=BuildCache(settings.images),
        registries=RegistryAccess(credentials=settings.pull_credentials, mirrors=mirrors),
        reads=reads,
    )
    return TaskImages(
        driver=driver,
        puller=puller,
        sources=spec.images.sources,
        budget_bytes=spec.images.disk_mib << 20,
        memory_bytes=start_scheduler.host_memory_bytes() // IMAGES_SHARE,
    )


def _snapshot_store(pool: ResolvedPool, driver: Driver) -> SnapshotStore | None:
    uri = pool.spec.snapshots_uri
    if uri is None:
        return None
    return SnapshotStore(stores.open_run_store(uri, pool.spec.store or StoreAccess()), driver)


async def _serve(
    heartbeat: HostHeartbeat, settings: HostSettings, shelf: SnapshotStore | None
) -> None:
    host = heartbeat.host
    names = (
        environments_pb2.DESCRIPTOR.services_by_name["EnvNodeService"].full_name,
        environment_access_pb2.DESCRIPTOR.services_by_name["EnvAccessService"].full_name,
        environment_state_pb2.DESCRIPTOR.services_by_name["EnvStateService"].full_name,
    )
    server = rpc_server.Server(names, settings.server.host, settings.server.port)
    grader = Grader(host.driver, host.cache, host.start_tracker)
    service = HostService(host, grader, settings.server.pod)
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(service, server.grpc_server)
    environment_access_pb2_grpc.add_EnvAccessServiceServicer_to_server(
        AccessService(host), server.grpc_server
    )
    environment_state_pb2_grpc.add_EnvStateServiceServicer_to_server(
        StateService(host, shelf), server.grpc_server
    )
    probes = Probes(settings.server.probe_port, settings.server.host)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        if shelf is not None:
            await stack.enter_async_context(
                shelf.sweep_periodically(host.states.snapshots.quota.ttl_s)
            )
        with shutdown_signals(stop):
            await probes.start()
            await server.start()
            host.endpoint = settings.advertise or f"{settings.server.host}:{server.port}"
            await server.set_ready()
            probes.ready = True
            await heartbeat.run(stop)
            probes.ready = False
            service.draining = heartbeat.draining = True
            await heartbeat.send()
            await heartbeat.wait_until_empty(settings.drain_s)
            await server.stop(DRAIN_S)
            await probes.stop()
