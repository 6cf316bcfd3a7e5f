"""The partners of a rollout worker over real gRPC: scripted, and faulty on demand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from typing_extensions import override

from etude.agent.chat import LAYOUT_TOKENS, ChatFormat
from etude.common.serving import Server
from etude.v1 import (
    environments_pb2,
    environments_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    rewards_pb2,
    rewards_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)

CALL = "<tool_call><function=read_file><parameter=path>a.py</parameter></function></tool_call>"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer with the layout's tokens."""
    alphabet = {byte: i for i, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in LAYOUT_TOKENS])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


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
        yield inference_pb2.GenerateResponse(
            token_ids=ids,
            logprobs=[-0.25] * len(ids),
            spans=[weights_pb2.PolicySpan(sampled=version, context=version, end=len(ids))],
            finish_reason=inference_pb2.FINISH_REASON_STOP,
        )

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
    """Serves whatever it is told to."""

    engine: Engine

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
        return weights_pb2.GetWeightStatusResponse()

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
        return weights_pb2.SetTargetResponse()


@dataclass(slots=True)
class Broker(environments_pb2_grpc.EnvBrokerServiceServicer):
    """Grants everything; the same key gives the same leases."""

    endpoint: str = ""
    granted: dict[str, list[environments_pb2.Lease]] = field(default_factory=dict)
    launches: list[environments_pb2.LaunchBatchRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    renewed: set[str] = field(default_factory=set)
    breaks: int = 0
    """Streams that break after their first answer."""
    held: int = 0
    most: int = 0

    @override
    async def LaunchBatch(
        self,
        request: environments_pb2.LaunchBatchRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.LaunchBatchRequest, environments_pb2.LaunchBatchResponse
        ],
    ) -> AsyncIterator[environments_pb2.LaunchBatchResponse]:
        self.launches.append(request)
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
        )

    @override
    async def RenewLeases(
        self,
        request: environments_pb2.RenewLeasesRequest,
        context: grpc.aio.ServicerContext[
            environments_pb2.RenewLeasesRequest, environments_pb2.RenewLeasesResponse
        ],
    ) -> environments_pb2.RenewLeasesResponse:
        self.renewed.update(request.lease_ids)
        return environments_pb2.RenewLeasesResponse()

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
    refusals: int = 0
    """Turns that are answered with UNAVAILABLE before any works."""
    diff: Sequence[bytes] = (b"the ", b"diff")
    """In chunks."""

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
        if self.losses:
            self.losses -= 1
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such lease")
        return environments_pb2.RunTurnResponse(
            results=[
                environments_pb2.ToolResult(call_id=call.call_id, content=b"x = 1")
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
    async def Grade(
        self,
        request_iterator: AsyncIterator[environments_pb2.GradeRequest],
        context: grpc.aio.ServicerContext[
            environments_pb2.GradeRequest, environments_pb2.GradeResponse
        ],
    ) -> environments_pb2.GradeResponse:
        return environments_pb2.GradeResponse()


@dataclass(slots=True)
class Rewards(rewards_pb2_grpc.RewardServiceServicer):
    """Gives siblings their rewards in turn; faults at first if told so."""

    values: Sequence[float] = (1.0,)
    faults: int = 0
    """Rollouts that cannot be scored before any can."""
    requests: list[rewards_pb2.ScoreRequest] = field(default_factory=list)

    @override
    async def Score(
        self,
        request: rewards_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[rewards_pb2.ScoreRequest, rewards_pb2.ScoreResponse],
    ) -> rewards_pb2.ScoreResponse:
        self.requests.append(request)
        records = []
        for rollout in request.rollouts:
            value = self.values[rollout.index % len(self.values)]
            record = rewards_pb2.RewardRecord(
                rollout_id=rollout.rollout_id, reward=value, success=value
            )
            if self.faults:
                self.faults -= 1
                record.fault.CopyFrom(rewards_pb2.RewardFault(reason="INFRA", message="no slot"))
            records.append(record)
        return rewards_pb2.ScoreResponse(records=records)

    @override
    async def Describe(
        self,
        request: rewards_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[
            rewards_pb2.DescribeRequest, rewards_pb2.DescribeResponse
        ],
    ) -> rewards_pb2.DescribeResponse:
        return rewards_pb2.DescribeResponse()


@dataclass(slots=True)
class Partners:
    """All of them behind one port."""

    engine: Engine
    broker: Broker
    node: Node
    rewards: Rewards
    target: str = ""


@pytest.fixture
async def partners(model_folder: Path) -> AsyncIterator[Partners]:
    """A world for one rollout worker."""
    made = Partners(Engine(ChatFormat.load(model_folder)), Broker(), Node(), Rewards())
    server = Server(["scripted"])
    grpc_server = server.grpc_server
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(made.engine, grpc_server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(Weights(made.engine), grpc_server)
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(made.broker, grpc_server)
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(made.node, grpc_server)
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(made.rewards, grpc_server)
    await server.start()
    made.target = made.broker.endpoint = f"127.0.0.1:{server.port}"
    yield made
    await server.stop(0.1)
