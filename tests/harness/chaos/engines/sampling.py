"""Requests that never stop: each answer is written down with its spans."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from tests.harness.chaos.engines.policy import CONTEXT, VOCABULARY
from tests.harness.chaos.engines.process import CALL_S, CutOffError, EngineProcess, cut_off
from tests.harness.chaos.journal import Journal

from etude.common.weights import VersionId
from etude.v1 import inference_pb2

AT_ONCE = 2
TOKENS = (20, 200)
PROMPT = (4, 40)
WAIT_S = 0.1


async def generated(engine: EngineProcess, request_id: str, prompt: Sequence[int], **how: Any):
    """Tokens, log-probs and the last message of one request."""
    request = inference_pb2.GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=inference_pb2.Sampling(**how)
    )
    tokens: list[int] = []
    logprobs: list[float] = []
    last = None
    with cut_off():
        async for last in engine.inference.Generate(request, timeout=CALL_S):
            tokens += last.token_ids
            logprobs += last.logprobs
    return tokens, logprobs, last


@dataclass(slots=True)
class Client:
    """What keeps one engine busy."""

    engine: EngineProcess
    journal: Journal
    chance: random.Random
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Clear while no request may begin."""
    running: int = 0

    async def sample(self) -> None:
        """Request after request, for ever."""
        number = 0
        while True:
            await self.may_go_on.wait()
            if self.engine.live is None:
                await asyncio.sleep(WAIT_S)
                continue
            number += 1
            self.running += 1
            try:
                await self._one(f"{self.engine.who}/{id(asyncio.current_task())}/{number}")
            finally:
                self.running -= 1

    async def pause(self) -> None:
        """Let what runs end, and begin nothing."""
        self.may_go_on.clear()
        while self.running:  # noqa: ASYNC110 - tasks end by themselves, at most CALL_S later
            await asyncio.sleep(WAIT_S)

    async def _one(self, request_id: str) -> None:
        who = self.engine.who
        prompt = [self.chance.randrange(VOCABULARY) for _ in range(self.chance.randint(*PROMPT))]
        count = min(self.chance.randint(*TOKENS), CONTEXT - len(prompt))
        seed = self.chance.randrange(1 << 31)
        try:
            tokens, logprobs, last = await generated(
                self.engine, request_id, prompt, max_tokens=count, temperature=1.0, seed=seed
            )
        except (grpc.aio.AioRpcError, CutOffError) as error:
            was_killed = who in self.engine.killed
            text = str(error)[:300]
            self.journal.write("unanswered", engine=who, killed=was_killed, text=text)
            await asyncio.sleep(WAIT_S)
            return
        self.journal.write(
            "answer",
            engine=who,
            asked=count,
            tokens=len(tokens),
            logprobs=len(logprobs),
            are_sound=all(math.isfinite(each) and each <= 0 for each in logprobs),
            spans=[
                [str(VersionId.from_proto(s.sampled)), s.start, s.end, s.replica]
                for s in (last.spans if last is not None else ())
            ],
        )
