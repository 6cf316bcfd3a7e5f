"""Services of a rollout worker: a scripted policy behind the engine's RPC, and a reward of 1."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.local import INITIAL
from etude.common.rpc.server import Server
from etude.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    rewards_pb2,
    rewards_pb2_grpc,
    weights_pb2,
)
from long_bench.script import write_turn


@dataclass(slots=True)
class ScriptedEngine(inference_pb2_grpc.InferenceServiceServicer):
    """Answers like an engine, in messages of as many tokens as asked for; its policy is a script.

    A version of one engine that samples a million tokens would take hours on a CPU.
    """

    chat: ChatFormat
    read_cpu_s: Callable[[], float] = lambda: 0.0
    """Reads the CPU time of the worker so far."""
    cpu_s: list[float] = field(default_factory=list)
    """Of the worker, at the beginning of each turn."""
    log: Path = Path("/nonexistent")
    """Folder of the worker's store."""
    log_bytes: int = 0
    """Of that folder, where it is largest."""

    @override
    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        ],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.cpu_s.append(self.read_cpu_s())
        self.log_bytes = max(self.log_bytes, _folder_bytes(self.log))
        ids = write_turn(self.chat, len(self.cpu_s))
        version = INITIAL.to_proto()
        step = request.message_tokens or len(ids)
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            end = start + len(part)
            finish = inference_pb2.FINISH_REASON_STOP
            yield inference_pb2.GenerateResponse(
                token_ids=part,
                logprobs=[-0.5] * len(part),
                spans=[weights_pb2.PolicySpan(sampled=version, context=version, end=end)],
                finish_reason=finish
                if end == len(ids)
                else inference_pb2.FINISH_REASON_UNSPECIFIED,
            )

    @override
    async def GetEngineInfo(
        self,
        request: inference_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineInfoRequest, inference_pb2.GetEngineInfoResponse
        ],
    ) -> inference_pb2.GetEngineInfoResponse:
        return inference_pb2.GetEngineInfoResponse(vocab_size=self.chat.vocab_size)

    @override
    async def GetEngineLoad(
        self,
        request: inference_pb2.GetEngineLoadRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineLoadRequest, inference_pb2.GetEngineLoadResponse
        ],
    ) -> inference_pb2.GetEngineLoadResponse:
        return inference_pb2.GetEngineLoadResponse()


class EqualRewards(rewards_pb2_grpc.RewardServiceServicer):
    """Gives every rollout the same reward."""

    @override
    async def Score(
        self,
        request: rewards_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[rewards_pb2.ScoreRequest, rewards_pb2.ScoreResponse],
    ) -> rewards_pb2.ScoreResponse:
        records = [
            rewards_pb2.RewardRecord(rollout_id=each.rollout_id, reward=1.0, success=1.0)
            for each in request.rollouts
        ]
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


@contextlib.asynccontextmanager
async def serve(engine: ScriptedEngine) -> AsyncIterator[str]:
    """Serve both on one port; gives host:port."""
    server = Server(["etude.v1.InferenceService", "etude.v1.RewardService"])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(engine, server.grpc_server)
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(EqualRewards(), server.grpc_server)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(1.0)


def _folder_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def read_cpu_s(pid: int) -> float:
    """CPU time of all threads of a process that run: proc(5), schedstat in nanoseconds."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text(encoding="ascii").split()[0]) for each in files) / 1e9
