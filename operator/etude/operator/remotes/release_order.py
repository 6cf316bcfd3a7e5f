"""Orders about a route's releases, as calls of its feedback service."""

from dataclasses import dataclass

import grpc

from etude.common.api.route.request import RequestedAction, RouteRequest
from etude.common.rpc.channels import CONTROL_DEADLINE_S
from etude.v1 import release_pb2, release_pb2_grpc, weights_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOrder:
    """Send a request of a person, or a proposal, to the feedback service of the route."""

    target: str
    request_id: str
    request: RouteRequest
    run_uid: str
    """Run that the route serves."""
    proposal: release_pb2.ProposeRequest | None = None
    """Figures of the candidate, where the request is to propose it."""
    asked_by: str = "kubectl"

    @property
    def caller(self) -> release_pb2.ReleaseCaller:
        return release_pb2.ReleaseCaller(
            request_id=self.request_id, caller=self.asked_by, reason=self.request.reason
        )

    @property
    def version(self) -> release_pb2.ServedPolicyVersion | None:
        """Version that the request names; None for the candidate under test."""
        if self.request.version is None:
            return None
        epoch, _, number = self.request.version.partition(".")
        version = weights_pb2.PolicyVersion(epoch=int(epoch), number=int(number))
        return release_pb2.ServedPolicyVersion(run_uid=self.run_uid, version=version)


async def send_release_order(
    channel: grpc.aio.Channel, order: ReleaseOrder
) -> release_pb2.ReleaseDecision:
    """Send an order; returns the decision."""
    stub = release_pb2_grpc.ReleaseServiceStub(channel)
    caller, limit_s = order.caller, CONTROL_DEADLINE_S
    match order.request.action:
        case RequestedAction.PROPOSE:
            propose = release_pb2.ProposeRequest(caller=caller)
            propose.MergeFrom(order.proposal or release_pb2.ProposeRequest())
            return (await stub.Propose(propose, timeout=limit_s)).decision
        case RequestedAction.PROMOTE:
            promote = release_pb2.PromoteRequest(
                caller=caller, version=order.version, without_gate=order.request.without_gate
            )
            return (await stub.Promote(promote, timeout=limit_s)).decision
        case RequestedAction.ROLL_BACK:
            back = release_pb2.RollBackRequest(caller=caller, version=order.version)
            return (await stub.RollBack(back, timeout=limit_s)).decision
        case RequestedAction.FREEZE:
            freeze = release_pb2.FreezeRequest(caller=caller)
            return (await stub.Freeze(freeze, timeout=limit_s)).decision
        case RequestedAction.UNFREEZE:
            unfreeze = release_pb2.UnfreezeRequest(caller=caller)
            return (await stub.Unfreeze(unfreeze, timeout=limit_s)).decision
