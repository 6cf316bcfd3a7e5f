"""`python -m gateway_bench.openai_engine PORT`: an engine for other gateways that costs nothing.

Speaks chat completions as vLLM does: 256 tokens, with log-probabilities and ids where asked for.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import uvicorn

from etude.gateway.turns import STREAM_TOKENS
from gateway_bench.engine import NUM_TOKENS

_WORDS = " line"


@cache
def write_parts(*, stream: bool, logprobs: bool, ids: bool) -> tuple[bytes, ...]:
    """Write the body of an answer; one part for each event of a stream."""
    size = STREAM_TOKENS if stream else NUM_TOKENS
    parts = []
    for start in range(0, NUM_TOKENS, size):
        count = min(size, NUM_TOKENS - start)
        message = {"role": "assistant", "content": _WORDS * count}
        choice: dict[str, Any] = {"index": 0, "delta" if stream else "message": message}
        is_last = start + count == NUM_TOKENS
        choice["finish_reason"] = "stop" if is_last else None
        if logprobs:
            each = {"token": _WORDS, "logprob": -0.5, "bytes": None, "top_logprobs": []}
            choice["logprobs"] = {"content": [each] * count}
        if ids:
            choice["token_ids"] = [1584] * count
        body: dict[str, Any] = {"id": "x", "created": 1, "model": "bench", "choices": [choice]}
        body["object"] = "chat.completion.chunk" if stream else "chat.completion"
        if ids and not start:
            body["prompt_token_ids"] = [1584] * 2000
        if not stream:
            total = 2000 + NUM_TOKENS
            counts = {"prompt_tokens": 2000, "completion_tokens": NUM_TOKENS}
            body["usage"] = counts | {"total_tokens": total}
        text = json.dumps(body).encode()
        parts.append(b"data: " + text + b"\n\n" if stream else text)
    return (*parts, b"data: [DONE]\n\n") if stream else tuple(parts)


async def answer(
    scope: Mapping[str, Any],
    receive: Callable[[], Awaitable[Mapping[str, Any]]],
    send: Callable[[Mapping[str, Any]], Awaitable[None]],
) -> None:
    """Answer one request, by the ASGI protocol."""
    data, has_more = b"", True
    while has_more:
        message = await receive()
        data += message.get("body", b"")
        has_more = message.get("more_body", False)
    asked = json.loads(data) if data else {}
    stream = bool(asked.get("stream"))
    parts = write_parts(
        stream=stream,
        logprobs=bool(asked.get("logprobs")),
        ids=bool(asked.get("return_token_ids")),
    )
    kind = b"text/event-stream" if stream else b"application/json"
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
    await send(head)
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


if __name__ == "__main__":
    config = uvicorn.Config(answer, port=int(sys.argv[1]), lifespan="off", log_level="warning")
    asyncio.run(uvicorn.Server(config).serve())
