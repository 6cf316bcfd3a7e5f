"""KEDA external scaler: serves the demand of pools that KEDA sizes."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import grpc
from pydantic import ValidationError
from typing_extensions import override

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.autoscaling import ScalingMode
from etude.common.errors import InvalidFieldError, UnavailableError, UnknownIdError, WrongStateError
from etude.common.rpc.server import Server
from etude.common.tls.transport import TransportSecurity, process_security
from etude.keda import external_scaler_pb2 as keda
from etude.keda import external_scaler_pb2_grpc
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Ref

METRIC = "etude-slots"
POOL, UTILIZATION = "pool", "targetUtilizationPercent"
"""Keys of a trigger's metadata."""
USUAL_PERCENT = 80


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """Demand of all pools, read from their statuses, which every replica caches."""

    cluster: Cluster

    def slots(self, namespace: str, metadata: Mapping[str, str]) -> int:
        """Slots of a trigger's pool that are leased, opening or waited for now.

        Or that plans ask for within the startup time of a replica, if those are more.

        Raises:
            InvalidFieldError: the trigger's metadata is not valid.
            UnknownIdError: the pool does not exist.
            WrongStateError: the pool is not in mode External.
            UnavailableError: its brokers do not report.
        """
        pool = self._external(namespace, metadata)
        told, slots = pool.status.autoscaler, pool.status.slots
        if told.mode != ScalingMode.EXTERNAL or slots is None:
            raise UnavailableError(f"the brokers of EnvPool {pool.metadata.name} do not report yet")
        return max(slots.leased + slots.opening + slots.queued, told.plan_peak)

    def per_replica(self, namespace: str, metadata: Mapping[str, str]) -> float:
        """Slots that one replica should serve; needs no report of a broker.

        Raises:
            InvalidFieldError: the trigger's metadata is not valid.
            UnknownIdError: the pool does not exist.
            WrongStateError: the pool is not in mode External.
        """
        pool = self._external(namespace, metadata)
        return _percent(metadata) / 100 * pool.spec.slots_per_replica

    def _external(self, namespace: str, metadata: Mapping[str, str]) -> EnvPool:
        name = metadata.get(POOL, "")
        if not name:
            raise InvalidFieldError(f"scalerMetadata.{POOL}", "is missing: name an EnvPool")
        # Checked by every RPC, so that each of them reports an invalid trigger.
        _percent(metadata)
        pool = self._pool(namespace, name)
        if pool.spec.mode is not ScalingMode.EXTERNAL:
            raise WrongStateError(
                f"EnvPool {name} is in mode {pool.spec.mode}: set spec.autoscaling.mode to External"
            )
        return pool

    def _pool(self, namespace: str, name: str) -> EnvPool:
        manifest = self.cluster.get(Ref("EnvPool", namespace, name))
        if manifest is None:
            raise UnknownIdError(f"no EnvPool {name} in namespace {namespace}")
        try:
            return EnvPool.parse_known_fields(manifest)
        except ValidationError as cause:
            raise WrongStateError(f"EnvPool {name} is not valid: see its conditions") from cause


def _percent(metadata: Mapping[str, str]) -> int:
    text = metadata.get(UTILIZATION, str(USUAL_PERCENT))
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise InvalidFieldError(f"scalerMetadata.{UTILIZATION}", f"{text!r} is not from 1 to 100")
    return int(text)


SERVICE = keda.DESCRIPTOR.services_by_name["ExternalScaler"].full_name
POLL_S = 0.5
"""Polling interval of a stream."""
DRAIN_S = 1.0


@dataclass(slots=True)
class ScalerService(external_scaler_pb2_grpc.ExternalScalerServicer):
    """Answers from the watch cache, on every replica of the operator."""

    demands: PoolDemand
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
                async with asyncio.timeout(POLL_S):
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
async def serve_scaler(
    cluster: Cluster, host: str, port: int | None, *, wire: TransportSecurity | None = None
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
    told = wire or process_security()
    credentials = told.credentials.for_server(asks=False) if told.credentials is not None else None
    unasked = TransportSecurity(allows_remote_plaintext=told.allows_remote_plaintext)
    server = Server([SERVICE], host, port, security=unasked, open_credentials=credentials)
    service = ScalerService(PoolDemand(cluster))
    external_scaler_pb2_grpc.add_ExternalScalerServicer_to_server(service, server.grpc_server)
    await server.start()
    await server.set_ready()
    try:
        yield server
    finally:
        service.stop.set()
        await server.stop(DRAIN_S)
