"""Client of the hosts' RPC service, over gRPC and in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from typing_extensions import override

from etude.common import telemetry
from etude.common.errors import UnavailableError, UserError
from etude.common.rpc import channels
from etude.common.tls.transport import TransportSecurity, process_security
from etude.v1 import environments_pb2, environments_pb2_grpc

OPEN_DEADLINE_S = 60.0
"""A host may have to fetch the workspace's source first."""
CLOSE_DEADLINE_S = 10.0


class HostCallError(UnavailableError):
    """A host did not answer, or failed the call."""

    reason = "NodeFailed"


class HostClient(Protocol):
    """Orders to hosts; every method raises HostCallError."""

    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]: ...

    async def close(self, endpoint: str, lease_ids: Sequence[str]) -> None: ...


@dataclass(slots=True)
class GrpcHostClient(HostClient):
    """Hosts at their endpoints."""

    security: TransportSecurity = field(default_factory=process_security)
    """Certificates or none; this process's default unless given."""
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    @override
    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        try:
            answer = await self._stub(endpoint).OpenEnvironments(
                request, timeout=OPEN_DEADLINE_S, metadata=telemetry.trace_metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise HostCallError(f"{endpoint}: {error.code().name}: {error.details()}") from error
        if len(answer.outcomes) != len(request.leases):
            raise HostCallError(f"{endpoint}: {len(answer.outcomes)} outcomes, not one per lease")
        return answer.outcomes

    @override
    async def close(self, endpoint: str, lease_ids: Sequence[str]) -> None:
        request = environments_pb2.CloseEnvironmentsRequest(lease_ids=lease_ids)
        try:
            await self._stub(endpoint).CloseEnvironments(request, timeout=CLOSE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise HostCallError(f"{endpoint}: {error.code().name}: {error.details()}") from error

    async def stop(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()

    def _stub(self, endpoint: str) -> "environments_pb2_grpc.EnvNodeServiceAsyncStub":
        if endpoint not in self._channels:
            try:
                self._channels[endpoint] = channels.dial(endpoint, security=self.security)
            except (
                UserError
            ) as cause:  # the host reported the address: it is no setting of this process
                raise HostCallError(str(cause)) from cause
        return environments_pb2_grpc.EnvNodeServiceStub(self._channels[endpoint])


@dataclass(slots=True)
class MemoryHostClient(HostClient):
    """Hosts without processes, for tests: they hold the ordered leases in memory."""

    slots: int = 1024
    failing: set[str] = field(default_factory=set)
    """Endpoints that do not answer."""
    held: dict[str, dict[str, environments_pb2.HeldLease]] = field(default_factory=dict)
    """Leases by endpoint and id."""
    snapshots: dict[str, list[environments_pb2.HeldSnapshot]] = field(default_factory=dict)
    """By endpoint."""
    orders: int = 0

    @override
    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        self.orders += 1
        if endpoint in self.failing:
            raise HostCallError(f"{endpoint}: does not answer")
        return [self._open(endpoint, held) for held in request.leases]

    @override
    async def close(self, endpoint: str, lease_ids: Sequence[str]) -> None:
        if endpoint in self.failing:
            raise HostCallError(f"{endpoint}: does not answer")
        for lease_id in lease_ids:
            self.held.get(endpoint, {}).pop(lease_id, None)

    def heartbeat(self, endpoint: str) -> environments_pb2.HeartbeatRequest:
        return environments_pb2.HeartbeatRequest(
            node_id=endpoint,
            endpoint=endpoint,
            driver="memory",
            isolation=environments_pb2.ISOLATION_WEAK,
            slots=self.slots,
            held=self.held.get(endpoint, {}).values(),
            snapshots=self.snapshots.get(endpoint, ()),
        )

    def _open(
        self, endpoint: str, held: environments_pb2.HeldLease
    ) -> environments_pb2.LaunchBatchResponse:
        mine = self.held.setdefault(endpoint, {})
        if len(mine) >= self.slots:
            failure = environments_pb2.LaunchFailure(reason="NoSlot", message="full")
            return environments_pb2.LaunchBatchResponse(index=held.index, failure=failure)
        kept = environments_pb2.HeldLease()
        kept.CopyFrom(held)
        kept.lease.endpoint = endpoint
        mine[held.lease.lease_id] = kept
        return environments_pb2.LaunchBatchResponse(index=held.index, lease=kept.lease)
