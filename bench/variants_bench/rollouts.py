"""Rollouts of the variants: limits, the engine's sampler, and traces of demonstrators."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from typing_extensions import override

from etude.agent.chat import ChatFormat
from etude.agent.completions import Completion, FinishReason
from etude.agent.local import LocalEnvironment
from etude.agent.rollout import run_rollout
from etude.agent.summaries import SummaryLimits
from etude.agent.token_policy import RolloutLimits, RolloutTask, Sampler
from etude.agent.trajectory import PolicySpan, Trajectory
from etude.agent.workspace import ExecResult, MemoryWorkspace
from etude.inference.engine.interface import Finish, SampleRequest
from variants_bench.demonstrators import Demonstrator
from variants_bench.puzzles import INSTRUCTION, PARTS, READER, Puzzle, draw

CONTEXT = 512
"""Tokens of a context: those of a whole rollout without summaries."""
REQUEST_TOKENS = 112
"""Room for the request in the tokenizer of these tasks."""
TURN_TOKENS, SUMMARY_TOKENS, MAX_TURNS = 32, 32, 10
MODEL_CONTEXT = CONTEXT + 128


SUMMARIES = SummaryLimits(
    context_tokens=CONTEXT, max_tokens=SUMMARY_TOKENS, request_tokens=REQUEST_TOKENS
)


def limits(*, summaries: bool) -> RolloutLimits:
    """Limits of a rollout; both ways have contexts of one length."""
    return RolloutLimits(
        max_turns=MAX_TURNS,
        max_turn_tokens=TURN_TOKENS,
        max_tokens=4 * CONTEXT if summaries else CONTEXT,
        timeout_s=600,
        summaries=SUMMARIES if summaries else None,
    )


@dataclass(slots=True)
class ReplicaSampler(Sampler):
    """Samples on the engine of this process."""

    engine: Any
    """A Replica: its module reads the environment when it is imported."""
    chat: ChatFormat
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @override
    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, temperature: float, seed: int | None
    ) -> Completion:
        request = SampleRequest(
            request_id=f"{id(self)}-{next(self._numbers)}",
            prompt_token_ids=list(prompt_ids),
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=sorted(self.chat.end_ids),
            seed=seed,
        )
        [chunk] = [chunk async for chunk in self.engine.generate(request)]
        ids, version = list(chunk.token_ids), self.engine.live
        reason = FinishReason.STOP if chunk.finish is Finish.STOP else FinishReason.LENGTH
        span = PolicySpan(0, len(ids), version, version)
        return Completion(ids, list(chunk.logprobs), [span], reason)


async def roll_out(
    sampler: Sampler, chat: ChatFormat, puzzle: Puzzle, *, summaries: bool, seed: int | None = None
) -> Trajectory:
    """Run one rollout in the real turn loop, on files in memory."""
    return await run_rollout(
        sampler,
        LocalEnvironment(READER, MemoryWorkspace(dict(puzzle.files), _refuse)),
        chat,
        READER,
        limits(summaries=summaries),
        RolloutTask(instruction=INSTRUCTION, seed=seed),
    )


def demonstrate(chat: ChatFormat, random: Random, count: int) -> list[Trajectory]:
    """Traces of demonstrators, every other one with summaries.

    Without them, it answers from what it read so far, or runs out of room.
    """

    async def work() -> list[Trajectory]:
        return [await one(summaries=number % 2 == 0) for number in range(count)]

    async def one(*, summaries: bool) -> Trajectory:
        last = PARTS - 1 if summaries else random.randrange(2, PARTS)
        demonstrator = Demonstrator(chat, random, answers_after=last)
        return await roll_out(demonstrator, chat, draw(random), summaries=summaries)

    return asyncio.run(work())


async def _refuse(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError(command)
