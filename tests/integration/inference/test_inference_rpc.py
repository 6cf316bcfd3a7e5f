"""Both services over real gRPC, on an engine in memory."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tests.support.weights.followed_versions import SCHEMA, damage
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.rpc.channels import dial
from etude.common.rpc.server import Server
from etude.common.weights import WeightManifest
from etude.inference.engine.fake import MemoryEngine
from etude.inference.engine.interface import EngineInfo
from etude.inference.service import SERVICES, InferenceServicer, WeightServicer
from etude.inference.status import ReplicaStatus
from etude.inference.updates.follower import VersionFollower
from etude.inference.updates.staging import Stager
from etude.v1 import inference_pb2, inference_pb2_grpc, weights_pb2, weights_pb2_grpc

DEADLINE_S = 20


@dataclass
class Replica:
    """A replica and its clients."""

    engine: MemoryEngine
    receiver: VersionFollower
    store: MemoryStore
    policy: TrainedPolicy
    inference: "inference_pb2_grpc.InferenceServiceAsyncStub"
    weights: "weights_pb2_grpc.WeightServiceAsyncStub"

    def publish(self, number: int) -> WeightManifest:
        self.policy.step()
        return self.policy.publish(self.store, number, run="run-1")

    async def commit(self, number: int) -> weights_pb2.WeightStatus:
        version = weights_pb2.PolicyVersion(epoch=1, number=number)
        request = weights_pb2.CommitVersionRequest(version=version)
        return (await self.weights.CommitVersion(request, timeout=DEADLINE_S)).status

    def generate(
        self,
        request_id: str = "r",
        *,
        stream: bool = False,
        max_tokens: int = 8,
        message_tokens: int = 0,
    ) -> "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]":
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            prompt_token_ids=[1, 2, 3],
            sampling=inference_pb2.Sampling(max_tokens=max_tokens, temperature=1.0),
            stream=stream,
            message_tokens=message_tokens,
        )
        return self.inference.Generate(request, timeout=DEADLINE_S)


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    store = MemoryStore()
    weights.claim_epoch(store, holder="t", parent=None, reason="start")
    info = EngineInfo(model="tiny", vocab_size=50, max_model_len=4_096, max_concurrent=4)
    engine = MemoryEngine(info)
    receiver = VersionFollower(
        stager=Stager(store, "run-1", tmp_path), engine=engine, status=ReplicaStatus(replica="r-0")
    )
    server = Server(SERVICES)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(engine=engine, http_port=7011, run_uid="run-1"), server.grpc_server
    )
    weights_pb2_grpc.add_WeightServiceServicer_to_server(
        WeightServicer(receiver), server.grpc_server
    )
    await server.start()
    async with dial(f"127.0.0.1:{server.port}") as channel:
        yield Replica(
            engine,
            receiver,
            store,
            TrainedPolicy(SCHEMA),
            inference_pb2_grpc.InferenceServiceStub(channel),
            weights_pb2_grpc.WeightServiceStub(channel),
        )
    await server.stop(0)


async def test_without_a_version_nothing_is_sampled(replica: Replica) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(replica.generate()))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "no verified policy version" in (caught.value.details() or "")


async def test_a_completion_comes_in_one_message_with_its_spans(replica: Replica) -> None:
    replica.publish(0)
    await replica.commit(0)
    [answer] = [message async for message in replica.generate()]
    assert len(answer.token_ids) == len(answer.logprobs) == 8
    assert answer.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    [span] = answer.spans
    assert (span.start, span.end, span.sampled.epoch, span.sampled.number) == (0, 8, 1, 0)


async def test_a_stream_carries_the_same_tokens_piece_by_piece(replica: Replica) -> None:
    replica.publish(0)
    await replica.commit(0)
    [whole] = [message async for message in replica.generate("a")]
    pieces = [message async for message in replica.generate("b", stream=True)]
    assert [t for piece in pieces for t in piece.token_ids] == list(whole.token_ids)
    assert len(pieces) == 8
    assert [bool(piece.spans) for piece in pieces] == [False] * 7 + [True]
    assert [piece.run_uid for piece in pieces] == ["run-1"] + [""] * 7


async def test_messages_of_some_tokens_each_carry_all_spans_so_far(replica: Replica) -> None:
    replica.publish(0)
    await replica.commit(0)
    [whole] = [message async for message in replica.generate("a")]
    pieces = [message async for message in replica.generate("b", message_tokens=3)]
    assert [t for piece in pieces for t in piece.token_ids] == list(whole.token_ids)
    assert [piece.spans[-1].end for piece in pieces] == [3, 6, 8]
    assert [bool(piece.finish_reason) for piece in pieces] == [False, False, True]


TOKENS = 4_000
"""As many as fit, so that the stream still runs when a commit arrives on a busy machine."""


async def test_a_swap_during_a_stream_splits_its_spans(replica: Replica) -> None:
    replica.publish(0)
    replica.publish(1)
    await replica.commit(0)
    pieces = []
    async for piece in replica.generate(stream=True, max_tokens=TOKENS):
        pieces.append(piece)
        if len(pieces) == 1:
            await replica.commit(1)
    spans = pieces[-1].spans
    assert [s.sampled.number for s in spans] == [0, 1]
    assert [s.context.number for s in spans] == [0, 0]
    assert spans[0].end == spans[1].start
    assert spans[-1].end == TOKENS


async def test_cancelling_frees_the_slot(replica: Replica) -> None:
    replica.publish(0)
    await replica.commit(0)
    for turn in range(20):
        call = replica.generate("same-id", stream=turn % 2 == 0, max_tokens=4_000)
        if turn % 2 == 0:
            await anext(aiter(call))
        else:
            await asyncio.sleep(0.01)
        call.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while replica.engine.running:  # noqa: ASYNC110 - the server's side has no event for us
                await asyncio.sleep(0.005)


async def test_a_request_id_that_is_running_is_refused(replica: Replica) -> None:
    replica.publish(0)
    await replica.commit(0)
    running = replica.generate("twin", stream=True, max_tokens=4_000)
    await anext(aiter(running))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(replica.generate("twin")))
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    running.cancel()


async def test_a_token_outside_the_vocabulary_is_named(replica: Replica) -> None:
    replica.publish(0)
    await replica.commit(0)
    request = inference_pb2.GenerateRequest(
        request_id="r", prompt_token_ids=[1, 50], sampling=inference_pb2.Sampling(max_tokens=1)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(replica.inference.Generate(request, timeout=DEADLINE_S)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("prompt_token_ids[1]: is 50")


async def test_engine_info_says_what_fits(replica: Replica) -> None:
    request = inference_pb2.GetEngineInfoRequest()
    info = await replica.inference.GetEngineInfo(request, timeout=DEADLINE_S)
    assert (info.model, info.vocab_size, info.max_model_len) == ("tiny", 50, 4_096)
    assert (info.max_concurrent, info.http_port) == (4, 7011)


async def test_an_engine_without_requests_has_no_load(replica: Replica) -> None:
    request = inference_pb2.GetEngineLoadRequest()
    load = await replica.inference.GetEngineLoad(request, timeout=DEADLINE_S)
    assert (load.running, load.waiting) == (0, 0)


async def test_a_commit_answers_with_the_live_version(replica: Replica) -> None:
    replica.publish(0)
    status = await replica.commit(0)
    assert status.replica == "r-0"
    assert status.state == weights_pb2.REPLICA_STATE_SERVING
    assert status == (await replica.commit(0))
    request = weights_pb2.GetWeightStatusRequest()
    assert (await replica.weights.GetWeightStatus(request, timeout=DEADLINE_S)).status == status


async def test_committing_what_was_never_published_is_not_found(replica: Replica) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replica.commit(5)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_committing_a_corrupt_version_is_data_loss(replica: Replica) -> None:
    damage(replica.store, replica.publish(0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await replica.commit(0)
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS


async def test_a_watch_starts_with_the_present_status_and_sees_the_commit(
    replica: Replica,
) -> None:
    replica.publish(0)
    watch = replica.weights.WatchWeightStatus(
        weights_pb2.WatchWeightStatusRequest(), timeout=DEADLINE_S
    )
    messages = aiter(watch)
    assert (await anext(messages)).status.state == weights_pb2.REPLICA_STATE_LOADING
    await replica.commit(0)
    assert (await anext(messages)).status.live.epoch == 1
    watch.cancel()
