"""RPC services of the inference role: sampling and weight updates."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind
from typing_extensions import override

from etude.common import telemetry
from etude.common.errors import ReusedIdError, UnavailableError, WrongStateError
from etude.common.tls import policy
from etude.common.weights import VersionId
from etude.inference.engine.interface import Finish, PolicyEngine, TokenChunk
from etude.inference.engine.load import read_load
from etude.inference.lending import LendingControl
from etude.inference.serving import messages
from etude.inference.serving.messages import policy_spans
from etude.inference.updates.follower import VersionFollower
from etude.v1 import inference_pb2, inference_pb2_grpc, weights_pb2, weights_pb2_grpc

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name,
)

_FINISH = {
    Finish.STOP: inference_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    Finish.ABORT: inference_pb2.FINISH_REASON_ABORT,
}

_tracer = trace.get_tracer("etude.inference")


@dataclass(slots=True, kw_only=True)
class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Samples from the live version; refuses while none is live."""

    engine: PolicyEngine
    http_port: int
    run_uid: str = ""
    """Run whose versions are served."""
    instance: str = ""
    """Name of this process in the spans of its tokens."""
    lending: LendingControl | None = None
    """Of an engine of a channel; others sample for everyone."""
    _running: set[str] = field(default_factory=set)

    @override
    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        ],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if self.engine.live is None:
            raise UnavailableError("no verified policy version is loaded yet")
        if self.engine.failed:
            raise UnavailableError(f"engine: {self.engine.failed}")
        sample = messages.sample_request(request, self.engine.info)
        with (
            self._slot(sample.request_id),
            self._admit(request, context) as lending,
            _model_call(request, self, context) as call,
        ):
            async with contextlib.aclosing(self.engine.generate(sample)) as sampled:
                given = sampled if lending is None else lending.until_recalled(sampled)
                async with contextlib.aclosing(given) as pieces:
                    async for piece in pieces:
                        for part in () if piece.routes is None else piece.routes.chunks():
                            yield inference_pb2.GenerateResponse(routes=part)
                        yield call.response(piece)

    @override
    async def GetEngineInfo(
        self,
        request: inference_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineInfoRequest, inference_pb2.GetEngineInfoResponse
        ],
    ) -> inference_pb2.GetEngineInfoResponse:
        info = self.engine.info
        return inference_pb2.GetEngineInfoResponse(
            model=info.model,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_concurrent=info.max_concurrent,
            http_port=self.http_port,
            records_routes=info.records_routes,
        )

    @override
    async def GetEngineLoad(
        self,
        request: inference_pb2.GetEngineLoadRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineLoadRequest, inference_pb2.GetEngineLoadResponse
        ],
    ) -> inference_pb2.GetEngineLoadResponse:
        return read_load().to_proto()

    @contextlib.contextmanager
    def _admit(
        self, request: inference_pb2.GenerateRequest, context: policy.AuthenticatedCall
    ) -> Iterator[LendingControl | None]:
        """Count a call of an engine that is lent at times; give the loan that ends the call."""
        if self.lending is None:
            yield None
            return
        self.lending.refuse_other_run(policy.caller_of(context), is_rollout=request.is_rollout)
        with self.lending.admit(is_rollout=request.is_rollout):
            yield self.lending if request.is_rollout else None

    @contextlib.contextmanager
    def _slot(self, request_id: str) -> Iterator[None]:
        if request_id in self._running:
            raise ReusedIdError(f"request_id: {request_id!r} is running already")
        self._running.add(request_id)
        try:
            yield
        finally:
            self._running.discard(request_id)


@dataclass(slots=True)
class _ModelCall:
    """Token count of one call, for its trace span and its policy spans."""

    span: trace.Span
    recomputes_kv: bool
    run_uid: str
    instance: str
    num_tokens: int = 0

    def response(self, piece: TokenChunk) -> inference_pb2.GenerateResponse:
        """The chunk as a message, with spans if it has labels; the last one with finish reason."""
        response = inference_pb2.GenerateResponse(
            token_ids=piece.token_ids, logprobs=piece.logprobs
        )
        if not self.num_tokens:
            response.run_uid = self.run_uid
        self.num_tokens += len(piece.token_ids)
        if piece.admitted is not None:
            spans = policy_spans(
                piece.labels,
                admitted=piece.admitted,
                num_tokens=self.num_tokens,
                recomputes=self.recomputes_kv,
                replica=self.instance,
            )
            response.spans.extend(spans)
        if piece.finish is not None:
            response.finish_reason = _FINISH[piece.finish]
            self.span.set_attribute("gen_ai.usage.output_tokens", self.num_tokens)
            self.span.set_attribute("gen_ai.response.model", str(piece.admitted))
        return response


@contextlib.contextmanager
def _model_call(
    request: inference_pb2.GenerateRequest,
    service: InferenceServicer,
    context: grpc.aio.ServicerContext[
        inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
    ],
) -> Iterator[_ModelCall]:
    info = service.engine.info
    # The caller's context is attached only while the span starts: a generator that is closed by
    # a cancelled call would detach it in another context.
    with telemetry.continue_trace(context.invocation_metadata()):
        span = _tracer.start_span(
            f"chat {info.model}",
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "etude",
                "gen_ai.request.model": info.model,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            },
        )
    try:
        yield _ModelCall(span, info.recomputes_kv_cache, service.run_uid, service.instance)
    finally:
        span.end()


@dataclass(slots=True)
class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Reports and changes the version that the replica serves."""

    follower: VersionFollower

    @override
    async def GetWeightStatus(
        self,
        request: weights_pb2.GetWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.GetWeightStatusRequest, weights_pb2.GetWeightStatusResponse
        ],
    ) -> weights_pb2.GetWeightStatusResponse:
        return weights_pb2.GetWeightStatusResponse(status=self._status())

    @override
    async def WatchWeightStatus(
        self,
        request: weights_pb2.WatchWeightStatusRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.WatchWeightStatusRequest, weights_pb2.WatchWeightStatusResponse
        ],
    ) -> AsyncIterator[weights_pb2.WatchWeightStatusResponse]:
        async for status in self.follower.watch():
            yield weights_pb2.WatchWeightStatusResponse(status=status.to_proto())

    @override
    async def CommitVersion(
        self,
        request: weights_pb2.CommitVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.CommitVersionRequest, weights_pb2.CommitVersionResponse
        ],
    ) -> weights_pb2.CommitVersionResponse:
        with telemetry.continue_trace(context.invocation_metadata()):
            version = VersionId.from_proto(request.version)
            status = await self.follower.activate(version)
        return weights_pb2.CommitVersionResponse(status=status.to_proto())

    @override
    async def AnnounceVersion(
        self,
        request: weights_pb2.AnnounceVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.AnnounceVersionRequest, weights_pb2.AnnounceVersionResponse
        ],
    ) -> weights_pb2.AnnounceVersionResponse:
        self.follower.notify(VersionId.from_proto(request.version))
        return weights_pb2.AnnounceVersionResponse()

    @override
    async def StageVersion(
        self,
        request: weights_pb2.StageVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.StageVersionRequest, weights_pb2.StageVersionResponse
        ],
    ) -> weights_pb2.StageVersionResponse:
        with telemetry.continue_trace(context.invocation_metadata()):
            status = await self.follower.stage(VersionId.from_proto(request.version))
        return weights_pb2.StageVersionResponse(status=status.to_proto())

    @override
    async def RollbackVersion(
        self,
        request: weights_pb2.RollbackVersionRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.RollbackVersionRequest, weights_pb2.RollbackVersionResponse
        ],
    ) -> weights_pb2.RollbackVersionResponse:
        with telemetry.continue_trace(context.invocation_metadata()):
            status = await self.follower.roll_back(VersionId.from_proto(request.version))
        return weights_pb2.RollbackVersionResponse(status=status.to_proto())

    @override
    async def SetTarget(
        self,
        request: weights_pb2.SetTargetRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.SetTargetRequest, weights_pb2.SetTargetResponse
        ],
    ) -> weights_pb2.SetTargetResponse:
        is_pinned = request.HasField("version")
        target = VersionId.from_proto(request.version) if is_pinned else None
        return weights_pb2.SetTargetResponse(status=self.follower.set_target(target).to_proto())

    @override
    async def SetLending(
        self,
        request: weights_pb2.SetLendingRequest,
        context: grpc.aio.ServicerContext[
            weights_pb2.SetLendingRequest, weights_pb2.SetLendingResponse
        ],
    ) -> weights_pb2.SetLendingResponse:
        lending = self._lending
        if lending is None:
            raise WrongStateError(
                f"{self.follower.status.replica} follows no channel: it belongs to a run"
            )
        now_s = time.monotonic()
        if request.seconds:
            lending.lend(request.seconds, now_s=now_s)
        else:
            lending.recall(now_s=now_s)
        return weights_pb2.SetLendingResponse(status=self._status())

    @property
    def _lending(self) -> LendingControl | None:
        channel = self.follower.channel
        return None if channel is None else channel.lending

    def _status(self) -> weights_pb2.WeightStatus:
        status = self.follower.status.to_proto()
        if self._lending is not None:
            self._lending.write_status(status, now_s=time.monotonic())
        return status
