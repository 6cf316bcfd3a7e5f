"""RPCs of a broker for the other brokers of its pool."""

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

import grpc
from typing_extensions import override

from etude.common.errors import InvalidFieldError
from etude.envserver.broker.launch_queue import BatchKey, BatchPart
from etude.envserver.broker.shards.router import ShardRouter
from etude.v1 import broker_peers_pb2 as pb2
from etude.v1 import broker_peers_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
Context = grpc.aio.ServicerContext[_Request, _Response]


@dataclass(slots=True)
class PeerService(broker_peers_pb2_grpc.BrokerPeerServiceServicer):
    """Serves what other brokers hand on, and never hands it on again."""

    router: ShardRouter

    @override
    async def ReportLoad(
        self,
        request: pb2.ReportLoadRequest,
        context: Context[pb2.ReportLoadRequest, pb2.ReportLoadResponse],
    ) -> pb2.ReportLoadResponse:
        peers = self.router.peers
        peers.record_load(request.load, now_s=time.monotonic())
        answer = pb2.ReportLoadResponse(load=peers.make_load(), shards=peers.shards)
        answer.load.shard.name, answer.load.shard.target = peers.name, peers.target
        return answer

    @override
    async def FindBatch(
        self,
        request: pb2.FindBatchRequest,
        context: Context[pb2.FindBatchRequest, pb2.FindBatchResponse],
    ) -> pb2.FindBatchResponse:
        broker = self.router.broker
        held = broker.ledger.of_batch(BatchKey(request.run_id, request.idempotency_key))
        for each in held.values():
            each.is_claimed = True
        return pb2.FindBatchResponse(
            held=[each.held for each in held.values()],
            has_snapshot=broker.ledger.hosts.has_snapshot(request.run_id, request.snapshot_id),
        )

    @override
    async def ForwardLaunch(
        self,
        request: pb2.ForwardLaunchRequest,
        context: Context[pb2.ForwardLaunchRequest, pb2.ForwardLaunchResponse],
    ) -> AsyncIterator[pb2.ForwardLaunchResponse]:
        if any(index >= request.launch.count for index in request.indices):
            raise InvalidFieldError("indices", f"must be less than {request.launch.count}")
        if request.indices:
            part = BatchPart(tuple(request.indices), request.wait_ms / 1000)
            outcomes = self.router.broker.launch(request.launch, part=part)
        else:
            outcomes = self.router.launch_here(request.launch)
        async with contextlib.aclosing(outcomes):
            async for outcome in outcomes:
                yield pb2.ForwardLaunchResponse(outcome=outcome)

    @override
    async def ForwardRenewal(
        self,
        request: pb2.ForwardRenewalRequest,
        context: Context[pb2.ForwardRenewalRequest, pb2.ForwardRenewalResponse],
    ) -> pb2.ForwardRenewalResponse:
        broker, renewal = self.router.broker, request.renewal
        known, unknown = broker.ledger.split_known(renewal.lease_ids, request.owner)
        broker.renew(known, renewal.ttl_seconds)
        if unknown:
            broker.require_rebuilt()
            self.router.refuse_moving(unknown)
        return pb2.ForwardRenewalResponse(missing_lease_ids=unknown)

    @override
    async def ForwardRelease(
        self,
        request: pb2.ForwardReleaseRequest,
        context: Context[pb2.ForwardReleaseRequest, pb2.ForwardReleaseResponse],
    ) -> pb2.ForwardReleaseResponse:
        broker = self.router.broker
        known, _ = broker.ledger.split_known(request.release.lease_ids, request.owner)
        await broker.release(known)
        return pb2.ForwardReleaseResponse()

    @override
    async def ForwardPlan(
        self,
        request: pb2.ForwardPlanRequest,
        context: Context[pb2.ForwardPlanRequest, pb2.ForwardPlanResponse],
    ) -> pb2.ForwardPlanResponse:
        report = request.report
        ready = self.router.broker.report_plan(report.run_id, report.plan)
        return pb2.ForwardPlanResponse(templates=ready)

    @override
    async def ForwardGroup(
        self,
        request: pb2.ForwardGroupRequest,
        context: Context[pb2.ForwardGroupRequest, pb2.ForwardGroupResponse],
    ) -> pb2.ForwardGroupResponse:
        self.router.broker.prepare(request.prepare)
        return pb2.ForwardGroupResponse()
