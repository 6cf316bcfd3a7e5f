"""ReleaseService: requests to change which version users are served, over gRPC."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from etude.common.api_keys import ApiKeyFile, KeyScope, read_bearer, require_scope
from etude.common.errors import InvalidFieldError
from etude.common.tls.identity import OPERATOR
from etude.common.tls.policy import caller_of
from etude.feedback.clock import LedgerClock
from etude.feedback.release import messages
from etude.feedback.release.evidence import (
    FreezeRequest,
    PromoteRequest,
    ProposeRequest,
    Request,
    RollbackRequest,
    UnfreezeRequest,
)
from etude.feedback.release.records import RequestId
from etude.feedback.release.release_log import ReleaseLog
from etude.v1 import release_pb2, release_pb2_grpc

NUM_DECISIONS = 10
"""Decisions in a status."""
_REQUEST_ID: TypeAdapter[str] = TypeAdapter(RequestId)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class ReleaseService(release_pb2_grpc.ReleaseServiceServicer):
    """Answers operators by their certificates, and people by API keys with the scope admin."""

    releases: ReleaseLog
    clock: LedgerClock
    keys: ApiKeyFile
    trusts_network: bool = False
    """Take a caller that has neither for the operator, as NetworkPolicies let no other through."""

    @override
    async def Propose(
        self, request: release_pb2.ProposeRequest, context: Context
    ) -> release_pb2.ProposeResponse:
        change = messages.build(
            ProposeRequest,
            **self._caller(request.caller, context),
            candidate=messages.read_version(request.candidate),
            gate=messages.read_gate(request),
        )
        decision = await self._answer(request.caller, change)
        return release_pb2.ProposeResponse(decision=decision)

    @override
    async def Promote(
        self, request: release_pb2.PromoteRequest, context: Context
    ) -> release_pb2.PromoteResponse:
        has_version = request.HasField("version")
        change = messages.build(
            PromoteRequest,
            **self._caller(request.caller, context),
            version=messages.read_version(request.version) if has_version else None,
            without_gate=request.without_gate,
        )
        decision = await self._answer(request.caller, change)
        return release_pb2.PromoteResponse(decision=decision)

    @override
    async def RollBack(
        self, request: release_pb2.RollBackRequest, context: Context
    ) -> release_pb2.RollBackResponse:
        has_version = request.HasField("version")
        change = messages.build(
            RollbackRequest,
            **self._caller(request.caller, context),
            version=messages.read_version(request.version) if has_version else None,
        )
        decision = await self._answer(request.caller, change)
        return release_pb2.RollBackResponse(decision=decision)

    @override
    async def Freeze(
        self, request: release_pb2.FreezeRequest, context: Context
    ) -> release_pb2.FreezeResponse:
        change = messages.build(FreezeRequest, **self._caller(request.caller, context))
        decision = await self._answer(request.caller, change)
        return release_pb2.FreezeResponse(decision=decision)

    @override
    async def Unfreeze(
        self, request: release_pb2.UnfreezeRequest, context: Context
    ) -> release_pb2.UnfreezeResponse:
        change = messages.build(UnfreezeRequest, **self._caller(request.caller, context))
        decision = await self._answer(request.caller, change)
        return release_pb2.UnfreezeResponse(decision=decision)

    @override
    async def GetReleaseStatus(
        self, request: release_pb2.GetReleaseStatusRequest, context: Context
    ) -> release_pb2.GetReleaseStatusResponse:
        self._authenticate(context)
        decisions = await asyncio.to_thread(self.releases.read_newest, NUM_DECISIONS)
        return messages.write_status(self.releases.describe(), decisions)

    async def _answer(
        self, caller: release_pb2.ReleaseCaller, request: Request
    ) -> release_pb2.ReleaseDecision:
        try:
            request_id = _REQUEST_ID.validate_python(caller.request_id, strict=True)
        except ValidationError:
            what = "must be 1 to 128 letters, digits and ._:/+-"
            raise InvalidFieldError("caller.request_id", what) from None
        now_ms = self.clock.now_ms()
        record = await asyncio.to_thread(self.releases.answer, request_id, request, now_ms=now_ms)
        return messages.write_decision(record)

    def _caller(self, caller: release_pb2.ReleaseCaller, context: Context) -> dict[str, str]:
        """Name of an authenticated caller, and its reason."""
        owner = self._authenticate(context)
        name = f"{owner}/{caller.caller}" if caller.caller else owner
        return {"caller": name, "reason": caller.reason}

    def _authenticate(self, context: Context) -> str:
        """Name of the caller: of its certificate, whose right was checked before, or of its key.

        Raises:
            UnauthenticatedError: it has neither.
            ForbiddenError: its key lacks the scope admin.
        """
        identity = caller_of(context)
        if identity is not None:
            return identity.role
        metadata = {str(name): value for name, value in context.invocation_metadata() or ()}
        if self.trusts_network and "authorization" not in metadata:
            return OPERATOR
        key = read_bearer(str(metadata.get("authorization", "")))
        owner = self.keys.identify(key)
        require_scope(owner, KeyScope.ADMIN)
        self.keys.count(key)
        return owner.user
