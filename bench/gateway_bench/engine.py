"""`python -m gateway_bench.engine MODEL_FOLDER PORT_FILE`: an engine that costs nothing.

Answers every call with the same 255 tokens and the end of the turn.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.common.rpc.server import Server
from etude.v1 import inference_pb2, inference_pb2_grpc, weights_pb2

NUM_TOKENS = 256
_WORDS = "The loop ends one step early, so the last line of the file is never read. "


@dataclass(slots=True)
class FixedEngine(inference_pb2_grpc.InferenceServiceServicer):
    """Says one text."""

    token_ids: list[int]

    @override
    async def Generate(
        self,
        request: inference_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
        ],
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        version = weights_pb2.PolicyVersion(epoch=1, number=1)
        size = request.message_tokens or NUM_TOKENS
        for start in range(0, NUM_TOKENS, size):
            end = min(start + size, NUM_TOKENS)
            finish = inference_pb2.FINISH_REASON_STOP if end == NUM_TOKENS else None
            yield inference_pb2.GenerateResponse(
                token_ids=self.token_ids[start:end],
                logprobs=[-0.5] * (end - start),
                spans=[weights_pb2.PolicySpan(sampled=version, context=version, end=end)],
                finish_reason=finish,
            )

    @override
    async def GetEngineInfo(
        self,
        request: inference_pb2.GetEngineInfoRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.GetEngineInfoRequest, inference_pb2.GetEngineInfoResponse
        ],
    ) -> inference_pb2.GetEngineInfoResponse:
        return inference_pb2.GetEngineInfoResponse(max_model_len=1 << 20)


async def main() -> None:
    """Serve until the process is killed."""
    chat = ChatFormat.load(Path(sys.argv[1]))
    ids = chat.encode_text(_WORDS * 30)[: NUM_TOKENS - 1]
    server = Server([])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        FixedEngine([*ids, chat.end_id]),  # type: ignore[abstract]  # nothing else is asked for
        server.grpc_server,
    )
    await server.start()
    port_file = Path(sys.argv[2])
    port_file.with_suffix(".new").write_text(str(server.port))
    port_file.with_suffix(".new").rename(port_file)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
