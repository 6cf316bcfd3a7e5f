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
from etude.envserver.broker.figures import quantile
from etude.v1 import environments_pb2, environments_pb2_grpc

WATCH_INTERVAL_S = 0.5
WATCH_MAX_SILENCE_S = 5.0


@dataclass(slots=True)
class BrokerService(environments_pb2_grpc.EnvBrokerServiceServicer):
    """Leases, for their clients and for the nodes."""

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
            present = report(self.broker)
            if present != last or time.monotonic() - sent_s >= WATCH_MAX_SILENCE_S:
                last, sent_s, sequence = present, time.monotonic(), sequence + 1
                answer = environments_pb2.WatchPoolResponse()
                answer.CopyFrom(present)
                answer.sequence = sequence
                yield answer
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self.stop.wait()
            except TimeoutError:
                continue


def report(broker: Broker) -> environments_pb2.WatchPoolResponse:
    """The pool as it is now; the sequence is the stream's to add."""
    nodes = [node for node in broker.ledger.nodes if not node.draining]
    figures = broker.figures
    return environments_pb2.WatchPoolResponse(
        nodes=len(nodes),
        slots=sum(node.slots for node in nodes),
        leased=len(broker.ledger.leases),
        waiting=len(broker.queue),
        granted_total=broker.ledger.granted_total,
        expired_total=broker.ledger.expired_total,
        driver=nodes[0].driver if nodes else "",
        isolation=min(
            (node.isolation for node in nodes), default=environments_pb2.ISOLATION_UNSPECIFIED
        ),
        acquire_p50_ms=quantile(figures.acquire_ms, 0.5),
        acquire_p99_ms=quantile(figures.acquire_ms, 0.99),
        opening=broker.ledger.nodes.opening,
        ready=sum(level.paused_clones for node in nodes for level in node.levels.values()),
        planned=broker.warming.planned,
        warm_percent=figures.warm_percent,
        start_p50_ms=quantile(figures.start_ms, 0.5),
        start_p95_ms=quantile(figures.start_ms, 0.95),
        lease_p50_seconds=quantile(figures.lease_s, 0.5),
        lease_p95_seconds=quantile(figures.lease_s, 0.95),
        leased_by_run=broker.ledger.by_run,
    )
