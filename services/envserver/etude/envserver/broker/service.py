"""A broker's RPCs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
from typing_extensions import override

from etude.common.errors import InvalidFieldError
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.pool_report import make_report, unix_ms
from etude.v1 import environments_pb2, environments_pb2_grpc

WATCH_INTERVAL_S = 0.5
WATCH_MAX_SILENCE_S = 5.0


@dataclass(slots=True)
class BrokerService(environments_pb2_grpc.EnvBrokerServiceServicer):
    """Leases, for their clients and for the hosts."""

    broker: Broker

    @override
    async def LaunchBatch(
        self,
        request: environments_pb2.LaunchBatchRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.LaunchBatchRequest, environments_pb2.LaunchBatchResponse
        ],
    ) -> AsyncIterator[environments_pb2.LaunchBatchResponse]:
        async with contextlib.aclosing(self.broker.launch(request)) as outcomes:
            async for outcome in outcomes:
                yield outcome

    @override
    async def RenewLeases(
        self,
        request: environments_pb2.RenewLeasesRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.RenewLeasesRequest, environments_pb2.RenewLeasesResponse
        ],
    ) -> environments_pb2.RenewLeasesResponse:
        missing = self.broker.renew(request.lease_ids, request.ttl_seconds)
        return environments_pb2.RenewLeasesResponse(missing_lease_ids=missing)

    @override
    async def ReleaseLeases(
        self,
        request: environments_pb2.ReleaseLeasesRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.ReleaseLeasesRequest, environments_pb2.ReleaseLeasesResponse
        ],
    ) -> environments_pb2.ReleaseLeasesResponse:
        await self.broker.release(request.lease_ids)
        return environments_pb2.ReleaseLeasesResponse()

    @override
    async def ReportPlan(
        self,
        request: environments_pb2.ReportPlanRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.ReportPlanRequest, environments_pb2.ReportPlanResponse
        ],
    ) -> environments_pb2.ReportPlanResponse:
        ready = self.broker.report_plan(request.run_id, request.plan)
        return environments_pb2.ReportPlanResponse(templates=ready)

    @override
    async def PrepareGroup(
        self,
        request: environments_pb2.PrepareGroupRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.PrepareGroupRequest, environments_pb2.PrepareGroupResponse
        ],
    ) -> environments_pb2.PrepareGroupResponse:
        self.broker.prepare(request)
        return environments_pb2.PrepareGroupResponse()

    @override
    async def Heartbeat(
        self,
        request: environments_pb2.HeartbeatRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.HeartbeatRequest, environments_pb2.HeartbeatResponse
        ],
    ) -> environments_pb2.HeartbeatResponse:
        if not request.node_id or not request.endpoint:
            raise InvalidFieldError("node_id", "a node needs a name and an endpoint")
        return self.broker.heartbeat(request)


@dataclass(slots=True)
class PoolService(environments_pb2_grpc.PoolServiceServicer):
    """The pool's state, for the operator."""

    broker: Broker
    stop: asyncio.Event
    """Ends the streams, which have no end of their own."""

    @override
    async def WatchPool(
        self,
        request: environments_pb2.WatchPoolRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.WatchPoolRequest, environments_pb2.WatchPoolResponse
        ],
    ) -> AsyncIterator[environments_pb2.WatchPoolResponse]:
        last, sent_s, sequence = None, 0.0, 0
        while not self.stop.is_set():
            present = make_report(self.broker)
            if present != last or time.monotonic() - sent_s >= WATCH_MAX_SILENCE_S:
                last, sent_s, sequence = present, time.monotonic(), sequence + 1
                answer = environments_pb2.WatchPoolResponse()
                answer.CopyFrom(present)
                answer.sequence = sequence
                answer.told_unix_ms = unix_ms(sent_s)
                yield answer
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self.stop.wait()
            except TimeoutError:
                continue

    @override
    async def Drain(
        self,
        request: environments_pb2.DrainRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.DrainRequest, environments_pb2.DrainResponse
        ],
    ) -> environments_pb2.DrainResponse:
        empty = self.broker.drain_hosts(request.node_ids, hold_s=float(request.hold_seconds))
        return environments_pb2.DrainResponse(empty_node_ids=empty)
