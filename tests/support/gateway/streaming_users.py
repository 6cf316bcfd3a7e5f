"""Users who stream through unchanged clients, and how their requests ended."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
from tests.support.gateway.served import MODEL, ServedGateway

from etude.gateway import metrics

TURNS = 3
"""Of one conversation."""
PAUSE_S = 0.2
"""After a request that failed."""


@dataclass(slots=True)
class StreamingUsers:
    """Conversations with one gateway, by clients as they come, which may retry by themselves."""

    gateway: ServedGateway
    max_tokens: int
    turns: int = 0
    """That were answered whole."""
    failures: list[str] = field(default_factory=list)
    """Errors that clients raised."""
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = count_requests()

    @property
    def retries(self) -> int:
        """Requests that reached the gateway beyond one for each turn or failure."""
        return count_requests() - self._before - self.turns - len(self.failures)

    async def converse(self, user: str, done: asyncio.Event, *, protocol: str) -> None:
        """Talk until `done`, and for one conversation at least."""
        ask = self._open(self.gateway.keys.get(user, self.gateway.key), protocol)
        is_first = True
        while not done.is_set() or is_first:
            messages: list[dict[str, str]] = [{"role": "user", "content": user}]
            for _ in range(TURNS):
                try:
                    text = "".join([piece async for piece in ask(messages)])
                except (openai.OpenAIError, anthropic.AnthropicError) as error:
                    self.failures.append(f"{protocol}: {error!r}")
                    await asyncio.sleep(PAUSE_S)
                    break
                self.turns += 1
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": "x"})
            is_first = False

    def _open(self, key: str, protocol: str) -> Callable[[Any], AsyncIterator[str]]:
        """Make a client of a protocol, with its own number of retries."""
        url, max_tokens = self.gateway.url, self.max_tokens
        chat = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=120)
        claude = anthropic.AsyncAnthropic(base_url=url, api_key=key, timeout=120)

        async def complete(messages: Any) -> AsyncIterator[str]:
            finish = None
            async for chunk in await chat.chat.completions.create(
                model=MODEL, messages=messages, stream=True, max_tokens=max_tokens
            ):
                yield chunk.choices[0].delta.content or ""
                finish = chunk.choices[0].finish_reason or finish
            assert finish in {"stop", "length"}

        async def message(messages: Any) -> AsyncIterator[str]:
            async with claude.messages.stream(
                model=MODEL, messages=messages, max_tokens=max_tokens
            ) as stream:
                async for piece in stream.text_stream:
                    yield piece
                answer = await stream.get_final_message()
            assert answer.stop_reason in {"end_turn", "max_tokens"}

        return complete if protocol == "chat" else message


def count_requests() -> int:
    """Requests that this process's gateways have answered, whatever the status."""
    return round(
        sum(
            sample.value
            for metric in metrics.REQUESTS.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        )
    )
