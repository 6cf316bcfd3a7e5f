"""Client of a pool: launches, renews and releases leases."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

import grpc

from etude.common.errors import EtudeError, UnavailableError
from etude.common.rpc import channels
from etude.common.rpc.broker_channel import dial_brokers
from etude.envserver.environment_api.settings import RUN_ID
from etude.v1 import (
    environment_access_pb2_grpc,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

log = logging.getLogger(__name__)

TTL_S = 60
"""Longest time by which a lease outlives this process."""
RENEW_S = 15.0
QUEUE_S = 30
TOOLSET = "Standard"


class NoEnvironmentError(UnavailableError):
    """The pool has no environment to give."""

    reason = "LaunchFailed"


@dataclass(slots=True)
class PoolClient:
    """The brokers of a pool, and the hosts of their leases."""

    brokers: str
    """Where they are found: host:port, separated by commas."""
    run_id: str = RUN_ID
    _leases: dict[str, environments_pb2.Lease] = field(default_factory=dict)
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def launch(self, template: str, uri: str, idempotency_key: str) -> environments_pb2.Lease:
        """Launch an environment; the same key again gives the same.

        Raises:
            NoEnvironmentError: the pool gave none.
        """
        request = environments_pb2.LaunchBatchRequest(
            run_id=self.run_id,
            idempotency_key=idempotency_key,
            template=template,
            workspace=environments_pb2.WorkspaceSource(uri=uri),
            count=1,
            toolset=TOOLSET,
            ttl_seconds=TTL_S,
            queue_timeout_seconds=QUEUE_S,
            lease_class=environments_pb2.LEASE_CLASS_SERVING,
        )
        limit_s = QUEUE_S + channels.CONTROL_DEADLINE_S
        async for outcome in self._broker().LaunchBatch(request, timeout=limit_s):
            if not outcome.HasField("lease"):
                raise NoEnvironmentError(f"{outcome.failure.reason}: {outcome.failure.message}")
            self._leases[outcome.lease.lease_id] = outcome.lease
            return outcome.lease
        raise NoEnvironmentError("the broker gave no answer")

    async def release(self, lease: environments_pb2.Lease) -> None:
        """End an environment; if the broker cannot be reached, it ends when its lease expires."""
        self._leases.pop(lease.lease_id, None)
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
        try:
            await self._broker().ReleaseLeases(request, timeout=channels.CONTROL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.warning("lease %s is not released: %s", lease.lease_id, error.details())

    def is_alive(self, lease: environments_pb2.Lease) -> bool:
        """True if the lease was renewed last time."""
        return lease.lease_id in self._leases

    async def run(self, stop: asyncio.Event) -> None:
        """Renew leases until told to stop; then end them."""
        while not stop.is_set():
            await self._renew()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await stop.wait()
        await asyncio.gather(*(self.release(lease) for lease in list(self._leases.values())))
        for channel in self._channels.values():
            await channel.close()

    def tools_stub(
        self, lease: environments_pb2.Lease
    ) -> "environments_pb2_grpc.EnvNodeServiceAsyncStub":
        """Stub of the service that runs the lease's tools."""
        return environments_pb2_grpc.EnvNodeServiceStub(self._channel(lease.endpoint))

    def access_stub(
        self, lease: environments_pb2.Lease
    ) -> "environment_access_pb2_grpc.EnvAccessServiceAsyncStub":
        """Stub of the service for the lease's files and programs."""
        return environment_access_pb2_grpc.EnvAccessServiceStub(self._channel(lease.endpoint))

    def state_stub(
        self, lease: environments_pb2.Lease
    ) -> "environment_state_pb2_grpc.EnvStateServiceAsyncStub":
        """Stub of the service that pauses and resumes the lease."""
        return environment_state_pb2_grpc.EnvStateServiceStub(self._channel(lease.endpoint))

    async def _renew(self) -> None:
        if not self._leases:
            return
        request = environments_pb2.RenewLeasesRequest(
            lease_ids=list(self._leases), ttl_seconds=TTL_S
        )
        try:
            answer = await self._broker().RenewLeases(request, timeout=channels.CONTROL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.warning("leases are not renewed: %s", error.details())
            return
        for lease_id in answer.missing_lease_ids:
            self._leases.pop(lease_id, None)

    def _broker(self) -> "environments_pb2_grpc.EnvBrokerServiceAsyncStub":
        channel = self._channels.setdefault(self.brokers, dial_brokers(self.brokers))
        return environments_pb2_grpc.EnvBrokerServiceStub(channel)

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = channels.dial(target)
        return self._channels[target]


_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


def http_status(code: grpc.StatusCode) -> int:
    """HTTP status of a gRPC code."""
    return _STATUS.get(code, 500)


def public_error(error: EtudeError | grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str]:
    """Code and text of an error that a caller may see."""
    if isinstance(error, EtudeError):
        return error.code, str(error)
    return error.code(), error.details() or error.code().name
