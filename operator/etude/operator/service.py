"""The operator's process in a cluster: caches always, workers while leading."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any

from etude.common import telemetry
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.operator.controller import kopf_source
from etude.operator.controller.leader_election import LeaderElector
from etude.operator.controller.operator import open_operator
from etude.operator.controller.status_writer import StatusDebounce
from etude.operator.integrations import apis
from etude.operator.integrations import keda_scaler as keda
from etude.operator.kube.cache import WatchCache, reduce_object
from etude.operator.kube.client import KubernetesCluster
from etude.operator.kube.discovery import Discovery
from etude.operator.kube.leases import KubernetesLeaseStore
from etude.operator.kube.rest import RestClient
from etude.operator.kube.watches import Watches
from etude.operator.remotes.clients import GrpcRemoteClient
from etude.operator.settings import Settings

STATUS_DEBOUNCE_S = 5.0
STATUS_SETTLE_S = 1.0
"""A trainer's pod becomes Ready and its controller reports within this: one write for both."""

log = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    """Watch always, act while leading; returns after SIGTERM.

    Raises:
        UserError: the settings lead to no API server.
    """
    if settings.otlp_endpoint is not None:  # without a tracer provider spans are no-ops
        telemetry.setup_tracing(
            "etude-operator", otlp_endpoint=settings.otlp_endpoint, traces_file=None
        )
    stop = asyncio.Event()
    async with _serve_probes(settings) as probes, _connect(settings) as rest:
        clock = rest.clock
        leader = LeaderElector(
            KubernetesLeaseStore(rest, settings.namespace, settings.lease), clock, settings.pod
        )
        cache = WatchCache(reduce_object)
        discovery = Discovery(apis.enabled_kinds(settings.platform))
        watches = Watches(rest, cache, settings.namespaces, discovery=discovery)
        cluster = KubernetesCluster(rest, cache, leader.may_write, discovery)
        made = open_operator(
            cluster,
            GrpcRemoteClient(),
            settings.platform,
            clock,
            instance=settings.pod,
            debounce=StatusDebounce(STATUS_DEBOUNCE_S, STATUS_SETTLE_S),
        )
        with shutdown_signals(stop):
            with _gc_disabled():
                is_filled = await _fill_caches(watches, stop)
            if is_filled:
                asked = keda.serve_scaler(cluster, settings.host, settings.scaler_port)
                async with asked, made as acting:
                    watching = kopf_source.watch_own_kinds(
                        watches.apply_event,
                        namespaces=settings.namespaces,
                        kubeconfig=settings.kubeconfig,
                    )
                    parts = {
                        "events": watching,
                        "caches": watches.keep_watching(),
                        "leader": leader.lead(acting.run),
                    }
                    await _serve_until(stop, parts, probes)
        await leader.release()
    log.info("stopped")


@contextlib.contextmanager
def _gc_disabled() -> Iterator[None]:
    """Exempt objects that are allocated in the block from garbage collection: they have no cycles.

    With ten thousand pods a full collection stops the process for a third of a second, and filling
    the caches would trigger ten.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def _fill_caches(watches: Watches, stop: asyncio.Event) -> bool:
    """Fill the caches; returns False if stopped before that, for example without an API server."""
    filling = asyncio.create_task(watches.sync(), name="sync")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({filling, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        filling.cancel()
        stopping.cancel()
        await asyncio.wait({filling, stopping})
    if filling.cancelled():
        return False
    filling.result()
    return True


async def _serve_until(
    stop: asyncio.Event, parts: Mapping[str, Coroutine[Any, Any, None]], probes: Probes
) -> None:
    """Run the tasks until stopped, and report readiness meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(part, name=name) for name, part in parts.items()]
        probes.ready = True
        await stop.wait()
        probes.ready = False
        for task in running:
            task.cancel()


@contextlib.asynccontextmanager
async def _serve_probes(settings: Settings) -> AsyncIterator[Probes]:
    probes = Probes(settings.probe_port, settings.host)
    await probes.start()
    try:
        yield probes
    finally:
        await probes.stop()


@contextlib.asynccontextmanager
async def _connect(settings: Settings) -> AsyncIterator[RestClient]:
    rest = await RestClient.connect(settings.kubeconfig, rate_per_s=settings.api_requests_per_s)
    try:
        yield rest
    finally:
        await rest.close()
