"""Conversations of one client with a gateway, their CPU and their times."""

import json
import time
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import httpx

from etude.gateway.turns import STREAM_TOKENS, WHOLE_TOKENS
from etude.v1 import inference_pb2, inference_pb2_grpc
from gateway_bench.engine import NUM_TOKENS

WARM_UP = 20
CONTINUED = "cpu_ms_per_request"
FIRST, STREAMED = "cpu_ms_first_turn", "cpu_ms_streamed_turn"
FRESH = "A line of a file that a user pasted, with some names and numbers in it: x_17 = f(42).\n"
TURNS_PER_CONVERSATION = 10
PROMPT_TOKENS = 4_000
"""About as many as a continued turn has in the middle of a conversation."""
Messages = list[dict[str, str]]


@dataclass(slots=True)
class Conversations:
    """One client that asks one question after the other."""

    client: httpx.AsyncClient
    cpu_s: Callable[[], float]
    """CPU time of what is measured, in seconds."""
    times_s: list[float] = field(default_factory=list)
    """Of the answers so far."""

    async def measure(self, turns: int) -> dict[str, float]:
        """Measure CPU of each kind of turn, and the time of continued and of streamed ones.

        All in milliseconds; `p50_ms` and `p99_ms` of an answer up to its last byte.
        """
        await self._continue(WARM_UP, stream=False)
        before_s = self.cpu_s()
        for number in range(turns):
            await self._ask([_user(f"Question {number}.\n" + FRESH * 80)], stream=False)
        figures = {FIRST: 1000 * (self.cpu_s() - before_s) / turns}
        figures[CONTINUED] = await self._continue(turns, stream=False)
        figures |= describe_times("", self.times_s)
        figures[STREAMED] = await self._continue(turns, stream=True)
        return figures | describe_times("streamed_", self.times_s)

    async def _continue(self, turns: int, *, stream: bool) -> float:
        """Ask continued turns; CPU of one, in milliseconds."""
        spent_s, times_s = 0.0, []
        for _ in range(-(-turns // TURNS_PER_CONVERSATION)):
            # The first turn of a conversation is not counted.
            messages = [_user(f"Question {time.time_ns()}.\n" + FRESH * 80)]
            await self._answer(messages, stream=stream)
            before_s = self.cpu_s()
            self.times_s = []
            for _ in range(TURNS_PER_CONVERSATION):
                messages.append(_user(f"And {time.time_ns()}? " + FRESH * 2))
                await self._answer(messages, stream=stream)
            spent_s += self.cpu_s() - before_s
            times_s += self.times_s
        self.times_s = times_s
        return 1000 * spent_s / len(times_s)

    async def _answer(self, messages: Messages, *, stream: bool) -> None:
        text = await self._ask(messages, stream=stream)
        messages.append({"role": "assistant", "content": text})

    async def _ask(self, messages: Messages, *, stream: bool) -> str:
        body = {"model": "bench", "messages": messages, "stream": stream}
        started_s = time.perf_counter()
        answer = await self.client.post("/v1/chat/completions", json=body)
        self.times_s.append(time.perf_counter() - started_s)
        answer.raise_for_status()
        if not stream:
            text: str = answer.json()["choices"][0]["message"]["content"]
            return text
        chunks = (
            json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
        )
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def measure_engine(channel: grpc.aio.Channel, turns: int) -> dict[str, float]:
    """Times of the calls themselves, without a gateway, in milliseconds."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    figures: dict[str, float] = {}
    for name, size in (("", WHOLE_TOKENS), ("streamed_", STREAM_TOKENS)):
        request = inference_pb2.GenerateRequest(
            request_id="bench",
            prompt_token_ids=range(PROMPT_TOKENS),
            sampling=inference_pb2.Sampling(max_tokens=NUM_TOKENS),
            message_tokens=size,
        )
        times_s = []
        for _ in range(WARM_UP + turns):
            started_s = time.perf_counter()
            await _read_all(stub.Generate(request))
            times_s.append(time.perf_counter() - started_s)
        figures |= describe_times(name, times_s[WARM_UP:])
    return figures


async def _read_all(answer: AsyncIterable[inference_pb2.GenerateResponse]) -> None:
    async for _ in answer:
        pass


def describe_times(name: str, times_s: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    ordered = sorted(times_s)
    return {
        f"{name}p{percent}_ms": 1000 * ordered[len(ordered) * percent // 100]
        for percent in (50, 99)
    }


def subtract_times(figures: dict[str, float], bare: dict[str, float]) -> dict[str, float]:
    """Replace the times by what a gateway adds to those of the bare engine."""
    cpu = {key: each for key, each in figures.items() if key.startswith("cpu")}
    added = {f"added_{key}": each - bare[key] for key, each in figures.items() if key not in cpu}
    return cpu | added


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
