"""Client of the hosts' RPC service, over gRPC and in memory."""

from collections.abc import Mapping, Sequence
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
PAUSE_DEADLINE_S = 30.0
"""A host writes the memory of some VMs to its disk, or reads it."""


class HostCallError(UnavailableError):
    """A host did not answer, or failed the call."""

    reason = "NodeFailed"


class HostClient(Protocol):
    """Orders to hosts; every method raises HostCallError."""

    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]: ...

    async def close(self, endpoint: str, lease_ids: Sequence[str]) -> None: ...

    async def preempt(self, endpoint: str, lease_ids: Sequence[str], count: int) -> Sequence[str]:
        """Pause some of these environments; returns those that are paused."""
        ...

    async def resume(self, endpoint: str, lease_ids: Sequence[str]) -> Sequence[str]:
        """Resume preempted environments; returns those that go on."""
        ...


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

    @override
    async def preempt(self, endpoint: str, lease_ids: Sequence[str], count: int) -> Sequence[str]:
        request = environments_pb2.PreemptEnvironmentsRequest(lease_ids=lease_ids, count=count)
        try:
            answer = await self._stub(endpoint).PreemptEnvironments(
                request, timeout=PAUSE_DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            raise HostCallError(f"{endpoint}: {error.code().name}: {error.details()}") from error
        return answer.lease_ids

    @override
    async def resume(self, endpoint: str, lease_ids: Sequence[str]) -> Sequence[str]:
        request = environments_pb2.ResumePreemptedRequest(lease_ids=lease_ids)
        try:
            answer = await self._stub(endpoint).ResumePreempted(request, timeout=PAUSE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise HostCallError(f"{endpoint}: {error.code().name}: {error.details()}") from error
        return answer.lease_ids

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
    busy: set[str] = field(default_factory=set)
    """Leases in a turn, which are not paused."""
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

    @override
    async def preempt(self, endpoint: str, lease_ids: Sequence[str], count: int) -> Sequence[str]:
        mine = self._held_by(endpoint)
        able = [each for each in lease_ids if each in mine and each not in self.busy]
        paused = [each for each in able if not mine[each].preempted][:count]
        for lease_id in paused:
            mine[lease_id].preempted = True
        return paused

    @override
    async def resume(self, endpoint: str, lease_ids: Sequence[str]) -> Sequence[str]:
        mine = self._held_by(endpoint)
        resumed = []
        for lease_id in lease_ids:
            if lease_id in mine and self._num_taken(mine) < self.slots:
                mine[lease_id].preempted = False
                resumed.append(lease_id)
        return resumed

    def heartbeat(self, endpoint: str) -> environments_pb2.HeartbeatRequest:
        return environments_pb2.HeartbeatRequest(
            node_id=endpoint,
            endpoint=endpoint,
            driver="memory",
            isolation=environments_pb2.ISOLATION_WEAK,
            slots=self.slots,
            can_preempt=True,
            held=self.held.get(endpoint, {}).values(),
            snapshots=self.snapshots.get(endpoint, ()),
        )

    def _held_by(self, endpoint: str) -> dict[str, environments_pb2.HeldLease]:
        if endpoint in self.failing:
            raise HostCallError(f"{endpoint}: does not answer")
        return self.held.setdefault(endpoint, {})

    @staticmethod
    def _num_taken(leases: Mapping[str, environments_pb2.HeldLease]) -> int:
        return sum(not each.preempted for each in leases.values())

    def _open(
        self, endpoint: str, held: environments_pb2.HeldLease
    ) -> environments_pb2.LaunchBatchResponse:
        mine = self.held.setdefault(endpoint, {})
        if self._num_taken(mine) >= self.slots:
            failure = environments_pb2.LaunchFailure(reason="NoSlot", message="full")
            return environments_pb2.LaunchBatchResponse(index=held.index, failure=failure)
        kept = environments_pb2.HeldLease()
        kept.CopyFrom(held)
        kept.lease.endpoint = endpoint
        mine[held.lease.lease_id] = kept
        return environments_pb2.LaunchBatchResponse(index=held.index, lease=kept.lease)
