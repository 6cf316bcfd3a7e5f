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
from etude.operator.controller.leader_election import Leader
from etude.operator.controller.operator import operator
from etude.operator.controller.status_writer import Pace
from etude.operator.integrations import apis
from etude.operator.integrations import keda_scaler as keda
from etude.operator.kube.cache import Cache, slim
from etude.operator.kube.client import KubernetesCluster
from etude.operator.kube.discovery import Discovery
from etude.operator.kube.leases import KubernetesLeases
from etude.operator.kube.rest import Rest
from etude.operator.kube.watches import Watches
from etude.operator.remotes.clients import GrpcPeers
from etude.operator.settings import Settings

STATUS_PACE_S = 5.0
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
    async with _probed(settings) as probes, _connected(settings) as rest:
        clock = rest.clock
        leader = Leader(
            KubernetesLeases(rest, settings.namespace, settings.lease), clock, settings.pod
        )
        cache = Cache(slim)
        discovery = Discovery(apis.kinds(settings.platform))
        watches = Watches(rest, cache, settings.namespaces, discovery=discovery)
        cluster = KubernetesCluster(rest, cache, leader.may_write, discovery)
        made = operator(
            cluster,
            GrpcPeers(),
            settings.platform,
            clock,
            instance=settings.pod,
            pace=Pace(STATUS_PACE_S, STATUS_SETTLE_S),
        )
        with shutdown_signals(stop):
            with _uncollected():
                is_filled = await _filled(watches, stop)
            if is_filled:
                asked = keda.serving(cluster, settings.host, settings.scaler_port)
                async with asked, made as acting:
                    watching = kopf_source.watch(
                        watches.observe,
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
def _uncollected() -> Iterator[None]:
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


async def _filled(watches: Watches, stop: asyncio.Event) -> bool:
    """Fill the caches; returns False if stopped before that, for example without an API server."""
    filling = asyncio.create_task(watches.sync(), name="sync")
    told = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({filling, told}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        filling.cancel()
        told.cancel()
        await asyncio.wait({filling, told})
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
async def _probed(settings: Settings) -> AsyncIterator[Probes]:
    probes = Probes(settings.probe_port, settings.host)
    await probes.start()
    try:
        yield probes
    finally:
        await probes.stop()


@contextlib.asynccontextmanager
async def _connected(settings: Settings) -> AsyncIterator[Rest]:
    rest = await Rest.connect(settings.kubeconfig, rate_per_s=settings.api_requests_per_s)
    try:
        yield rest
    finally:
        await rest.close()
