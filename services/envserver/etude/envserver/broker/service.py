"""A broker's RPCs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
from typing_extensions import override

from etude.common.errors import InvalidFieldError, WrongStateError
from etude.common.tls.lease_owner import owned_run_id, owner_of
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.pool_report import make_report, unix_ms
from etude.envserver.broker.pool_updates import HostProblems, PoolUpdates
from etude.envserver.broker.shards.router import ShardRouter
from etude.envserver.read_grants.grantor import ReadGrantor
from etude.v1 import environments_pb2 as pb2
from etude.v1 import environments_pb2_grpc

WATCH_INTERVAL_S = 0.5
WATCH_MAX_SILENCE_S = 5.0

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[_Request, _Response]


@dataclass(slots=True)
class BrokerService(environments_pb2_grpc.EnvBrokerServiceServicer):
    """Leases, for their clients and for the hosts."""

    router: ShardRouter
    updates: PoolUpdates | None = None
    """The pool's spec for its hosts; None where they have it from elsewhere."""
    problems: HostProblems = field(default_factory=HostProblems)
    grantor: ReadGrantor = field(init=False)

    def __post_init__(self) -> None:
        broker = self.router.broker
        self.grantor = ReadGrantor(lambda: broker.spec, broker.dispatcher.workspaces)

    @override
    async def ListShards(
        self,
        request: pb2.ListShardsRequest,
        context: Context[pb2.ListShardsRequest, pb2.ListShardsResponse],
    ) -> pb2.ListShardsResponse:
        return pb2.ListShardsResponse(shards=self.router.peers.shards)

    @override
    async def LaunchBatch(
        self,
        request: pb2.LaunchBatchRequest,
        context: Context[pb2.LaunchBatchRequest, pb2.LaunchBatchResponse],
    ) -> AsyncIterator[pb2.LaunchBatchResponse]:
        request.run_id = owned_run_id(context, request.run_id)
        async with contextlib.aclosing(self.router.launch(request)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    @override
    async def RenewLeases(
        self,
        request: pb2.RenewLeasesRequest,
        context: Context[pb2.RenewLeasesRequest, pb2.RenewLeasesResponse],
    ) -> pb2.RenewLeasesResponse:
        missing = await self.router.renew(
            request.lease_ids, request.ttl_seconds, owner=owner_of(context)
        )
        return pb2.RenewLeasesResponse(missing_lease_ids=missing)

    @override
    async def ReleaseLeases(
        self,
        request: pb2.ReleaseLeasesRequest,
        context: Context[pb2.ReleaseLeasesRequest, pb2.ReleaseLeasesResponse],
    ) -> pb2.ReleaseLeasesResponse:
        await self.router.release(request.lease_ids, owner=owner_of(context))
        return pb2.ReleaseLeasesResponse()

    @override
    async def ReportPlan(
        self,
        request: pb2.ReportPlanRequest,
        context: Context[pb2.ReportPlanRequest, pb2.ReportPlanResponse],
    ) -> pb2.ReportPlanResponse:
        run_id = owned_run_id(context, request.run_id)
        ready = await self.router.report_plan(run_id, request.plan)
        return pb2.ReportPlanResponse(templates=ready)

    @override
    async def PrepareGroup(
        self,
        request: pb2.PrepareGroupRequest,
        context: Context[pb2.PrepareGroupRequest, pb2.PrepareGroupResponse],
    ) -> pb2.PrepareGroupResponse:
        request.run_id = owned_run_id(context, request.run_id)
        await self.router.prepare(request)
        return pb2.PrepareGroupResponse()

    @override
    async def Heartbeat(
        self,
        request: pb2.HeartbeatRequest,
        context: Context[pb2.HeartbeatRequest, pb2.HeartbeatResponse],
    ) -> pb2.HeartbeatResponse:
        if not request.node_id or not request.endpoint:
            raise InvalidFieldError("node_id", "a node needs a name and an endpoint")
        now_s = time.monotonic()
        self.problems.record(request.node_id, request.unavailable, now_s=now_s)
        answer = pb2.HeartbeatResponse()
        if not request.unavailable:
            answer = self.router.broker.heartbeat(request)
        answer.shards.extend(self.router.peers.shards)
        if self.updates is not None:
            answer.pool_revision = self.updates.current.revision
            answer.may_restart = self.updates.may_restart(
                request.node_id, request.pool_revision, now_s=now_s
            )
        return answer

    @override
    async def DescribePool(
        self,
        request: pb2.DescribePoolRequest,
        context: Context[pb2.DescribePoolRequest, pb2.DescribePoolResponse],
    ) -> pb2.DescribePoolResponse:
        found = require_updates(self.updates).current
        return pb2.DescribePoolResponse(pool_json=found.text, revision=found.revision)

    @override
    async def GrantReads(
        self,
        request: pb2.GrantReadsRequest,
        context: Context[pb2.GrantReadsRequest, pb2.GrantReadsResponse],
    ) -> pb2.GrantReadsResponse:
        return await asyncio.to_thread(self.grantor.grant, request)


@dataclass(slots=True)
class PoolService(environments_pb2_grpc.PoolServiceServicer):
    """The pool's state, for the operator."""

    broker: Broker
    stop: asyncio.Event
    """Ends the streams, which have no end of their own."""
    updates: PoolUpdates | None = None
    problems: HostProblems = field(default_factory=HostProblems)

    @override
    async def WatchPool(
        self,
        request: pb2.WatchPoolRequest,
        context: Context[pb2.WatchPoolRequest, pb2.WatchPoolResponse],
    ) -> AsyncIterator[pb2.WatchPoolResponse]:
        last, sent_s, sequence = None, 0.0, 0
        while not self.stop.is_set():
            present = make_report(self.broker)
            self._add_spec_figures(present)
            if present != last or time.monotonic() - sent_s >= WATCH_MAX_SILENCE_S:
                last, sent_s, sequence = present, time.monotonic(), sequence + 1
                answer = pb2.WatchPoolResponse()
                answer.CopyFrom(present)
                answer.sequence = sequence
                answer.told_unix_ms = unix_ms(sent_s)
                yield answer
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self.stop.wait()
            except TimeoutError:
                continue

    def _add_spec_figures(self, report: pb2.WatchPoolResponse) -> None:
        found = self.problems.current(now_s=time.monotonic())
        report.problems.extend(
            pb2.NodeProblem(node_id=name, message=message) for name, message in found.items()
        )
        if self.updates is not None:
            report.pool_revision = self.updates.current.revision

    @override
    async def Drain(
        self, request: pb2.DrainRequest, context: Context[pb2.DrainRequest, pb2.DrainResponse]
    ) -> pb2.DrainResponse:
        empty = self.broker.drain_hosts(request.node_ids, hold_s=float(request.hold_seconds))
        return pb2.DrainResponse(empty_node_ids=empty)

    @override
    async def UpdatePool(
        self,
        request: pb2.UpdatePoolRequest,
        context: Context[pb2.UpdatePoolRequest, pb2.UpdatePoolResponse],
    ) -> pb2.UpdatePoolResponse:
        revision = require_updates(self.updates).replace(request.pool_json)
        return pb2.UpdatePoolResponse(revision=revision)


def require_updates(updates: PoolUpdates | None) -> PoolUpdates:
    """The pool's spec, for its hosts.

    Raises:
        WrongStateError: this broker was started without it.
    """
    if updates is None:
        raise WrongStateError("this broker has no description of its pool")
    return updates
