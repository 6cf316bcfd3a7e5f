"""KEDA external scaler: serves the demand of pools that KEDA sizes."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
from typing_extensions import override

from etude.common.errors import UnavailableError
from etude.common.serving import Server
from etude.common.tls.wire import Wire, own
from etude.keda import external_scaler_pb2 as keda
from etude.keda import external_scaler_pb2_grpc
from etude.operator.cluster.api import Cluster
from etude.operator.keda.demand import METRIC, Demands

SERVICE = keda.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
LOOK_S = 0.5
"""Polling interval of a stream."""
DRAIN_S = 1.0


@dataclass(slots=True)
class ScalerService(external_scaler_pb2_grpc.ExternalScalerServicer):
    """Answers from the watch cache, on every replica of the operator."""

    demands: Demands
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Ends the streams."""

    def _slots(self, about: keda.ScaledObjectRef) -> int:
        return self.demands.slots(about.namespace, about.scalerMetadata)

    @override
    async def IsActive(
        self,
        request: keda.ScaledObjectRef,
        context: grpc.aio.ServicerContext[keda.ScaledObjectRef, keda.IsActiveResponse],
    ) -> keda.IsActiveResponse:
        return keda.IsActiveResponse(result=self._slots(request) > 0)

    @override
    async def StreamIsActive(
        self,
        request: keda.ScaledObjectRef,
        context: grpc.aio.ServicerContext[keda.ScaledObjectRef, keda.IsActiveResponse],
    ) -> AsyncIterator[keda.IsActiveResponse]:
        last: bool | None = None
        while not self.stop.is_set():
            # While brokers do not report, the state is unknown.
            with contextlib.suppress(UnavailableError):
                present = self._slots(request) > 0
                if present != last:
                    last = present
                    yield keda.IsActiveResponse(result=present)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.stop.wait()

    @override
    async def GetMetricSpec(
        self,
        request: keda.ScaledObjectRef,
        context: grpc.aio.ServicerContext[keda.ScaledObjectRef, keda.GetMetricSpecResponse],
    ) -> keda.GetMetricSpecResponse:
        target = self.demands.per_replica(request.namespace, request.scalerMetadata)
        whole = max(1, math.floor(target))
        spec = keda.MetricSpec(metricName=METRIC, targetSize=whole, targetSizeFloat=target)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    @override
    async def GetMetrics(
        self,
        request: keda.GetMetricsRequest,
        context: grpc.aio.ServicerContext[keda.GetMetricsRequest, keda.GetMetricsResponse],
    ) -> keda.GetMetricsResponse:
        slots = self._slots(request.scaledObjectRef)
        value = keda.MetricValue(
            metricName=METRIC, metricValue=slots, metricValueFloat=float(slots)
        )
        return keda.GetMetricsResponse(metricValues=[value])


@contextlib.asynccontextmanager
async def serving(
    cluster: Cluster, host: str, port: int | None, *, wire: Wire | None = None
) -> AsyncIterator[Server | None]:
    """Serve the scaler for the duration of the block; does nothing without a port.

    Args:
        cluster: the cluster of the pools.
        host: address to listen on.
        port: 0 picks a free one.
        wire: transport security; by default that of this process.

    Raises:
        OSError: the port is taken.
    """
    if port is None:
        yield None
        return
    # KEDA has no certificate of this trust domain, and needs none: TLS proves the server and
    # encrypts. Only counts are served, and a NetworkPolicy limits the clients.
    told = wire or own()
    credentials = told.credentials.for_server(asks=False) if told.credentials is not None else None
    unasked = Wire(leaves_machine=told.leaves_machine)
    server = Server([SERVICE], host, port, wire=unasked, open_credentials=credentials)
    service = ScalerService(Demands(cluster))
    external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server(service, server.grpc_server)
    await server.start()
    await server.ready()
    try:
        yield server
    finally:
        service.stop.set()
        await server.stop(DRAIN_S)
