"""A streaming client that never pauses: each request that fails or is cut is counted."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import openai

from etude.feedback.simulate.conversations import MAX_TURN_TOKENS, TOOLS

_PAUSE_S = 0.05


@dataclass(slots=True)
class StreamingLoad:
    """Requests that stream, one after the other, through swaps and releases."""

    client: openai.AsyncOpenAI
    """With the key of a user who is in no window, and without retries."""
    model: str
    instruction: str
    num_requests: int = 0
    num_failed: int = 0
    version: str = ""
    """Policy version of the newest whole answer."""
    _must_stop: asyncio.Event = field(default_factory=asyncio.Event)
    _has_stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self) -> None:
        """Stop after the request that runs, and wait for its end."""
        self._must_stop.set()
        await self._has_stopped.wait()

    async def run(self) -> None:
        """Ask until told to stop; every other request does not stream, and tells its version."""
        try:
            await self._ask_on()
        finally:
            self._has_stopped.set()

    async def _ask_on(self) -> None:
        while not self._must_stop.is_set():
            self.num_requests += 1
            try:
                if self.num_requests % 2:
                    is_whole = await self._stream()
                else:
                    is_whole = await self._ask()
            except openai.OpenAIError:
                is_whole = False
            self.num_failed += not is_whole
            await asyncio.sleep(_PAUSE_S)

    @property
    def _request(self) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": TOOLS.native_prompt},
            {"role": "user", "content": self.instruction},
        ]
        limit = MAX_TURN_TOKENS
        tools = TOOLS.schemas()
        return {"model": self.model, "messages": messages, "tools": tools, "max_tokens": limit}

    async def _stream(self) -> bool:
        """True if a stream ends as the protocol says."""
        finish = None
        stream = await self.client.chat.completions.create(**self._request, stream=True)
        async for chunk in stream:
            finish = chunk.choices[0].finish_reason or finish
        return finish is not None

    async def _ask(self) -> bool:
        answer = await self.client.chat.completions.create(**self._request)
        self.version = answer.system_fingerprint or ""
        return bool(answer.choices[0].finish_reason)
