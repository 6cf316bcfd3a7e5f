"""Simulated engine: fixed time per token, bounded slots, and a cache of prefix blocks.

Covered: queueing for slots, prefill of what is not cached, LRU eviction of blocks, messages of some
tokens with spans, a loss in the middle of calls. Not covered: batching effects on the time of a
token, preemption, the cost of gRPC itself.
"""

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from dataclasses import dataclass, field

import grpc

from etude.v1 import inference_pb2, weights_pb2

TOKEN_S = 0.02
PREFILL_TOKEN_S = 0.0004
SLOTS = 16
BLOCK_TOKENS = 32
CACHE_BLOCKS = 6_000
"""192 k tokens: about twice what the rollouts of one engine hold at a time."""

VERSION = weights_pb2.PolicyVersion(epoch=1, number=1)


def lost_error() -> grpc.aio.AioRpcError:
    """The error of a call to an engine that is gone."""
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details="gone")


@dataclass(slots=True)
class BestCache:
    """Blocks that any engine ever computed: one unbounded cache for all, the best possible."""

    blocks: set[int] = field(default_factory=set)
    hits: int = 0


@dataclass(slots=True)
class SimulatedEngine:
    """One engine."""

    name: str
    best: BestCache
    length_of: Callable[[str], int]
    """Returns the length of a completion by the id of its rollout."""
    tokens_by_second: Counter[int] = field(default_factory=Counter)
    hits: int = 0
    """Blocks of prompts that were cached."""
    prompt_blocks: int = 0
    is_lost: bool = False
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))
    _cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)

    def Generate(  # noqa: N802 - as the stub
        self, request: inference_pb2.GenerateRequest, **_: object
    ) -> "SimulatedCall":
        """The call as the stub makes it."""
        return SimulatedCall(self._generate(request))

    async def _generate(
        self, request: inference_pb2.GenerateRequest
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        now_s = asyncio.get_running_loop().time
        self._check()
        async with self._slots:
            prompt = list(request.prompt_token_ids)
            keys = block_keys(prompt)
            cached = self._look_up(keys)
            await asyncio.sleep((len(prompt) - cached * BLOCK_TOKENS) * PREFILL_TOKEN_S)
            self._check()
            self._store(keys)
            draw = random.Random(request.sampling.seed)  # noqa: S311 - a simulation
            left = min(self.length_of(request.episode), request.sampling.max_tokens)
            sampled: list[int] = []
            part = 1
            while left:
                part = min(part, left)
                began_s = now_s()
                await asyncio.sleep(part * TOKEN_S)
                self._check()
                self._count(part, began_s, now_s())
                ids = [draw.randrange(10, 1 << 30) for _ in range(part)]
                sampled += ids
                left -= part
                if not left:
                    self._store(block_keys([*prompt, *sampled]))
                yield _message(ids, len(sampled), is_last=not left)
                part = request.message_tokens

    def _check(self) -> None:
        if self.is_lost:
            raise lost_error()

    def _look_up(self, keys: Sequence[int]) -> int:
        """Leading blocks that are cached."""
        self.prompt_blocks += len(keys)
        self.best.hits += _leading(keys, self.best.blocks)
        num_cached = _leading(keys, self._cache)
        self.hits += num_cached
        return num_cached

    def _store(self, keys: Sequence[int]) -> None:
        self.best.blocks.update(keys)
        for key in keys:
            self._cache[key] = None
            self._cache.move_to_end(key)
        while len(self._cache) > CACHE_BLOCKS:
            self._cache.popitem(last=False)

    def _count(self, num_tokens: int, began_s: float, ended_s: float) -> None:
        """Spread tokens over the seconds in which they were sampled."""
        for place in range(num_tokens):
            share = (place + 0.5) / num_tokens
            self.tokens_by_second[int(began_s + (ended_s - began_s) * share)] += 1


@dataclass(slots=True)
class SimulatedCall:
    """Stream of one call."""

    messages: AsyncGenerator[inference_pb2.GenerateResponse, None]
    _closing: "asyncio.Future[None] | None" = None

    def __aiter__(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        return self.messages

    def cancel(self) -> bool:
        """End the stream; the generator's own end frees its slot."""
        self._closing = asyncio.ensure_future(self.messages.aclose())
        return True


def block_keys(token_ids: Sequence[int]) -> list[int]:
    """Key of each whole block, which stands for everything before it too."""
    keys, before = [], 0
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        before = hash((before, *token_ids[start : start + BLOCK_TOKENS]))
        keys.append(before)
    return keys


def _leading(keys: Sequence[int], known: Container[int]) -> int:
    for place, key in enumerate(keys):
        if key not in known:
            return place
    return len(keys)


def _message(ids: list[int], total: int, *, is_last: bool) -> inference_pb2.GenerateResponse:
    span = weights_pb2.PolicySpan(sampled=VERSION, context=VERSION, end=total)
    return inference_pb2.GenerateResponse(
        token_ids=ids,
        logprobs=[-1.0] * len(ids),
        spans=[span],
        finish_reason=inference_pb2.FINISH_REASON_STOP if is_last else None,
    )
