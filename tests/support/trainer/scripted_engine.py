"""An engine that says what it is told to, over real gRPC, and faulty on demand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.routed_experts import RouteRows
from etude.inference.engine.fake import route_tokens
from etude.v1 import inference_pb2, inference_pb2_grpc, weights_pb2, weights_pb2_grpc

CALL = "<tool_call><function=read_file><parameter=path>a.py</parameter></function></tool_call>"


@dataclass(slots=True)
class Engine(inference_pb2_grpc.InferenceServiceServicer):
    """Says the same turns in every rollout: one call, then the end."""

    chat: ChatFormat
    turns: Sequence[str] = (CALL, "Done.")
    delay_s: float = 0.0
    holds_after: int | None = None
    """Calls that are answered before any more wait until they are cancelled."""
    refusals: int = 0
    """Calls that are answered with UNAVAILABLE before any works."""
    aborts: int = 0
    """Completions that are aborted before any is finished."""
    version: weights_pb2.PolicyVersion = field(
        default_factory=lambda: weights_pb2.PolicyVersion(epoch=1, number=3)
    )
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most: int = 0

    @override
    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        ],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine restarts")
        self.requests.append(request)
        self.is_asked.set()
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.holds_after is not None and len(self.requests) > self.holds_after:
                await asyncio.Event().wait()
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        if self.aborts:
            self.aborts -= 1
            yield inference_pb2.GenerateResponse(finish_reason=inference_pb2.FINISH_REASON_ABORT)
            return
        turn = self.chat.decode(request.prompt_token_ids).count("<|tool|>")
        ids = self.chat.completion(self.turns[turn])
        version = self.version
        if request.HasField("routes_from"):
            tokens = [*request.prompt_token_ids, *ids[:-1]]
            rows = RouteRows(request.routes_from, route_tokens(tokens[request.routes_from :]))
            for part in rows.chunks():
                yield inference_pb2.GenerateResponse(routes=part)
        yield inference_pb2.GenerateResponse(
            token_ids=ids,
            logprobs=[-0.25] * len(ids),
            spans=[weights_pb2.PolicySpan(sampled=version, context=version, end=len(ids))],
            finish_reason=inference_pb2.FINISH_REASON_STOP,
        )

    @override
    async def GetEngineLoad(
        self,
        request: inference_pb2.GetEngineLoadRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineLoadRequest, inference_pb2.GetEngineLoadResponse
        ],
    ) -> inference_pb2.GetEngineLoadResponse:
        return inference_pb2.GetEngineLoadResponse()

    @override
    async def GetEngineInfo(
        self,
        request: inference_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineInfoRequest, inference_pb2.GetEngineInfoResponse
        ],
    ) -> inference_pb2.GetEngineInfoResponse:
        return inference_pb2.GetEngineInfoResponse()


@dataclass(slots=True)
class Weights(weights_pb2_grpc.WeightServiceServicer):
    """Serves whatever it is told to, and names the manifests that it is given."""

    engine: Engine
    manifests: dict[int, bytes] = field(default_factory=dict)
    """SHA-256 by number of version."""
    target: weights_pb2.PolicyVersion | None = None
    suspects: bool = False
    """An audit found its memory damaged."""

    def status(self) -> weights_pb2.WeightStatus:
        live = self.engine.version
        return weights_pb2.WeightStatus(
            state=weights_pb2.REPLICA_STATE_SERVING,
            live=live,
            manifest_sha256=self.manifests.get(live.number, b""),
            target=self.target,
            suspect_since=live if self.suspects else None,
        )

    @override
    async def CommitVersion(
        self,
        request: weights_pb2.CommitVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.CommitVersionRequest, weights_pb2.CommitVersionResponse
        ],
    ) -> weights_pb2.CommitVersionResponse:
        self.engine.version = request.version
        status = weights_pb2.WeightStatus(live=request.version, last_pause_seconds=0.003)
        return weights_pb2.CommitVersionResponse(status=status)

    @override
    async def GetWeightStatus(
        self,
        request: weights_pb2.GetWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.GetWeightStatusRequest, weights_pb2.GetWeightStatusResponse
        ],
    ) -> weights_pb2.GetWeightStatusResponse:
        return weights_pb2.GetWeightStatusResponse(status=self.status())

    @override
    async def WatchWeightStatus(
        self,
        request: weights_pb2.WatchWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.WatchWeightStatusRequest, weights_pb2.WatchWeightStatusResponse
        ],
    ) -> AsyncIterator[weights_pb2.WatchWeightStatusResponse]:
        yield weights_pb2.WatchWeightStatusResponse()

    @override
    async def AnnounceVersion(
        self,
        request: weights_pb2.AnnounceVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.AnnounceVersionRequest, weights_pb2.AnnounceVersionResponse
        ],
    ) -> weights_pb2.AnnounceVersionResponse:
        return weights_pb2.AnnounceVersionResponse()

    @override
    async def StageVersion(
        self,
        request: weights_pb2.StageVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.StageVersionRequest, weights_pb2.StageVersionResponse
        ],
    ) -> weights_pb2.StageVersionResponse:
        return weights_pb2.StageVersionResponse()

    @override
    async def RollbackVersion(
        self,
        request: weights_pb2.RollbackVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.RollbackVersionRequest, weights_pb2.RollbackVersionResponse
        ],
    ) -> weights_pb2.RollbackVersionResponse:
        return weights_pb2.RollbackVersionResponse()

    @override
    async def SetTarget(
        self,
        request: weights_pb2.SetTargetRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.SetTargetRequest, weights_pb2.SetTargetResponse
        ],
    ) -> weights_pb2.SetTargetResponse:
        self.target = self.engine.version = request.version
        return weights_pb2.SetTargetResponse(status=self.status())
