"""A broker and a node of environments, scripted, over real gRPC, and faulty on demand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
from typing_extensions import override

from etude.v1 import environments_pb2, environments_pb2_grpc


@dataclass(slots=True)
class Broker(environments_pb2_grpc.EnvBrokerServiceServicer):
    """Grants everything; the same key gives the same leases."""

    endpoint: str = ""
    granted: dict[str, list[environments_pb2.Lease]] = field(default_factory=dict)
    launches: list[environments_pb2.LaunchBatchRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    renewed: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    """Leases that are gone."""
    plans: list[environments_pb2.ReportPlanRequest] = field(default_factory=list)
    ready_by_unix_ms: int = 0
    """What is said of every template that a plan names."""
    is_full: bool = False
    """True while launches wait for slots."""
    breaks: int = 0
    """Streams that break after their first answer."""
    held: int = 0
    most: int = 0
    can_save: bool = True
    """Whether environments can be saved."""
    lost_snapshots: int = 0
    """Launches from a snapshot that find it gone before any finds it."""
    announced: list[environments_pb2.PrepareGroupRequest] = field(default_factory=list)

    @override
    async def LaunchBatch(
        self,
        request: environments_pb2.LaunchBatchRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.LaunchBatchRequest, environments_pb2.LaunchBatchResponse
        ],
    ) -> AsyncIterator[environments_pb2.LaunchBatchResponse]:
        self.launches.append(request)
        while self.is_full:  # noqa: ASYNC110 - a test sets it
            await asyncio.sleep(0.01)
        if request.snapshot_id and self.lost_snapshots:
            self.lost_snapshots -= 1
            await context.abort(grpc.StatusCode.NOT_FOUND, "no host holds the snapshot")
        leases = self.granted.get(request.idempotency_key)
        if leases is None:
            leases = [self._lease(request, place) for place in range(request.count)]
            self.granted[request.idempotency_key] = leases
            self.held += request.count
            self.most = max(self.most, self.held)
        for place, lease in enumerate(leases):
            if place and self.breaks:
                self.breaks -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the broker restarts")
            yield environments_pb2.LaunchBatchResponse(index=place, lease=lease)

    def _lease(
        self, request: environments_pb2.LaunchBatchRequest, place: int
    ) -> environments_pb2.Lease:
        return environments_pb2.Lease(
            lease_id=f"{request.idempotency_key}/{place}",
            endpoint=self.endpoint,
            agent_token="agent",
            control_token="control",
            driver="scripted",
            isolation=environments_pb2.ISOLATION_WEAK,
            caps=environments_pb2.Caps(files=self.can_save),
        )

    @override
    async def ListShards(
        self,
        request: environments_pb2.ListShardsRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.ListShardsRequest, environments_pb2.ListShardsResponse
        ],
    ) -> environments_pb2.ListShardsResponse:
        """A broker that is alone."""
        return environments_pb2.ListShardsResponse()

    @override
    async def DescribePool(
        self,
        request: environments_pb2.DescribePoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.DescribePoolRequest, environments_pb2.DescribePoolResponse
        ],
    ) -> environments_pb2.DescribePoolResponse:
        return environments_pb2.DescribePoolResponse()

    @override
    async def GrantReads(
        self,
        request: environments_pb2.GrantReadsRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.GrantReadsRequest, environments_pb2.GrantReadsResponse
        ],
    ) -> environments_pb2.GrantReadsResponse:
        return environments_pb2.GrantReadsResponse()

    @override
    async def ReportPlan(
        self,
        request: environments_pb2.ReportPlanRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.ReportPlanRequest, environments_pb2.ReportPlanResponse
        ],
    ) -> environments_pb2.ReportPlanResponse:
        self.plans.append(request)
        names = sorted({wave.template for wave in request.plan.waves})
        ready = [
            environments_pb2.TemplateReady(template=name, ready_by_unix_ms=self.ready_by_unix_ms)
            for name in names
        ]
        return environments_pb2.ReportPlanResponse(templates=ready)

    @override
    async def PrepareGroup(
        self,
        request: environments_pb2.PrepareGroupRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.PrepareGroupRequest, environments_pb2.PrepareGroupResponse
        ],
    ) -> environments_pb2.PrepareGroupResponse:
        self.announced.append(request)
        return environments_pb2.PrepareGroupResponse()

    @override
    async def RenewLeases(
        self,
        request: environments_pb2.RenewLeasesRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.RenewLeasesRequest, environments_pb2.RenewLeasesResponse
        ],
    ) -> environments_pb2.RenewLeasesResponse:
        self.renewed.update(request.lease_ids)
        gone = self.missing.intersection(request.lease_ids)
        return environments_pb2.RenewLeasesResponse(missing_lease_ids=gone)

    @override
    async def ReleaseLeases(
        self,
        request: environments_pb2.ReleaseLeasesRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.ReleaseLeasesRequest, environments_pb2.ReleaseLeasesResponse
        ],
    ) -> environments_pb2.ReleaseLeasesResponse:
        self.released += request.lease_ids
        self.held -= len(request.lease_ids)
        return environments_pb2.ReleaseLeasesResponse()

    @override
    async def Heartbeat(
        self,
        request: environments_pb2.HeartbeatRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.HeartbeatRequest, environments_pb2.HeartbeatResponse
        ],
    ) -> environments_pb2.HeartbeatResponse:
        return environments_pb2.HeartbeatResponse()


@dataclass(slots=True)
class Node(environments_pb2_grpc.EnvNodeServiceServicer):
    """Answers every call with the same text; may lose its first environments."""

    losses: int = 0
    """Turns that find their environment gone."""
    losses_after: int | None = None
    """Answered calls after which one turn finds its environment gone."""
    refusals: int = 0
    """Turns that are answered with UNAVAILABLE before any works."""
    diff: Sequence[bytes] = (b"the ", b"diff")
    """In chunks."""
    too_large: str = ""
    answer: bytes = b"x = 1"
    ran: list[tuple[str, str]] = field(default_factory=list)
    """Lease and id of each call that was answered."""

    @override
    async def RunTurn(
        self,
        request: environments_pb2.RunTurnRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.RunTurnRequest, environments_pb2.RunTurnResponse
        ],
    ) -> environments_pb2.RunTurnResponse:
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the node restarts")
        if self.losses or len(self.ran) == self.losses_after:
            self.losses, self.losses_after = max(0, self.losses - 1), None
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        self.ran += [(request.lease_id, call.call_id) for call in request.calls]
        return environments_pb2.RunTurnResponse(
            results=[
                environments_pb2.ToolResult(call_id=call.call_id, content=self.answer)
                for call in request.calls
            ]
        )

    @override
    async def Diff(
        self,
        request: environments_pb2.DiffRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.DiffRequest, environments_pb2.DiffResponse
        ],
    ) -> AsyncIterator[environments_pb2.DiffResponse]:
        if self.too_large:
            yield environments_pb2.DiffResponse(too_large=self.too_large)
            return
        for part in self.diff:
            yield environments_pb2.DiffResponse(chunk=part)

    @override
    async def OpenEnvironments(
        self,
        request: environments_pb2.OpenEnvironmentsRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.OpenEnvironmentsRequest, environments_pb2.OpenEnvironmentsResponse
        ],
    ) -> environments_pb2.OpenEnvironmentsResponse:
        return environments_pb2.OpenEnvironmentsResponse()

    @override
    async def CloseEnvironments(
        self,
        request: environments_pb2.CloseEnvironmentsRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.CloseEnvironmentsRequest, environments_pb2.CloseEnvironmentsResponse
        ],
    ) -> environments_pb2.CloseEnvironmentsResponse:
        return environments_pb2.CloseEnvironmentsResponse()

    @override
    async def PreemptEnvironments(
        self,
        request: environments_pb2.PreemptEnvironmentsRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.PreemptEnvironmentsRequest,
            environments_pb2.PreemptEnvironmentsResponse,
        ],
    ) -> environments_pb2.PreemptEnvironmentsResponse:
        return environments_pb2.PreemptEnvironmentsResponse()

    @override
    async def ResumePreempted(
        self,
        request: environments_pb2.ResumePreemptedRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.ResumePreemptedRequest, environments_pb2.ResumePreemptedResponse
        ],
    ) -> environments_pb2.ResumePreemptedResponse:
        return environments_pb2.ResumePreemptedResponse()

    @override
    async def Grade(
        self,
        request_iterator: AsyncIterator[environments_pb2.GradeRequest],
        context: grpc.aio.ServicerContext[
            environments_pb2.GradeRequest, environments_pb2.GradeResponse
        ],
    ) -> environments_pb2.GradeResponse:
        return environments_pb2.GradeResponse()
