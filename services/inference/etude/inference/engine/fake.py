"""Fake engine for tests: real weights in numpy, tokens from a hash."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from typing_extensions import override

from etude.common.routed_experts import ExpertIds, RouteRows
from etude.common.weights import VersionId
from etude.common.weights.replicas.live_weights import LiveWeights, slice_regions
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.words import Words, word_type
from etude.inference.engine.interface import (
    EngineInfo,
    Finish,
    LabelSpan,
    PolicyEngine,
    SampleRequest,
    TokenChunk,
)
from etude.inference.swap.coordinator import SwapCoordinator
from etude.inference.swap.forward_gate import ForwardGate
from etude.inference.swap.ranks import Ranks
from etude.inference.worker.rank import Rank


class MemoryRanks(Ranks):
    """Tensor-parallel ranks over numpy arrays; injected failures look like real ones."""

    def __init__(self, ranks: int = 1) -> None:
        self.words: list[dict[str, Words]] = [{} for _ in range(ranks)]
        """Live parameters of each rank."""
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}
        """Rank whose next call of a method fails, by method."""
        self._ranks = [Rank(lambda schema, _, n=n: self._open(schema, n)) for n in range(ranks)]  # type: ignore[misc]  # lambda with a default

    def _open(self, schema: Schema, rank: int) -> LiveWeights:
        regions = slice_regions(schema, rank, len(self._ranks))
        words = {
            schema.tensors[place].name: np.zeros(
                max(region.parameter_stop for region in held),
                word_type(schema.tensors[place].dtype),
            )
            for place, held in regions.items()
        }
        self.words[rank] = words
        return LiveWeights(schema, words, regions)

    @override
    async def call(self, method: str, *args: object) -> Sequence[Any]:
        await asyncio.sleep(0)
        self.calls.append(method)
        answers = [getattr(rank, method)(*args) for rank in self._ranks]
        if method in self.fail:
            answers[self.fail.pop(method)] = False
        return answers


@dataclass(slots=True)
class MemoryEngine(PolicyEngine, ForwardGate):
    """Samples one token per event-loop iteration by hashing the prefix and the live version."""

    info: EngineInfo
    ranks: MemoryRanks = field(default_factory=MemoryRanks)
    swap: SwapCoordinator = field(init=False)
    running: set[str] = field(default_factory=set)
    activated: list[VersionId] = field(default_factory=list)
    dropped_caches: int = 0
    _live: VersionId | None = None
    _failed: str = ""
    _thawed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.swap = SwapCoordinator(self.ranks, self)
        self._thawed.set()

    @property
    @override
    def live(self) -> VersionId | None:
        """Version that new requests are admitted under."""
        return self._live

    @property
    @override
    def failed(self) -> str:
        """Reason of the failure that stopped the engine."""
        return self._failed or self.swap.failed

    @property
    def is_thawed(self) -> bool:
        """True while requests make progress."""
        return self._thawed.is_set()

    def fail(self, why: str) -> None:
        """Stop like a real engine whose forward pass fails."""
        self._failed = why

    @override
    async def freeze(self) -> None:
        self._thawed.clear()
        await asyncio.sleep(0)

    @override
    async def relabel(self, version: VersionId, *, drop_cache: bool) -> None:
        self._live = version
        self.dropped_caches += drop_cache
        self.activated.append(version)

    @override
    async def thaw(self) -> None:
        self._thawed.set()

    @override
    async def generate(self, request: SampleRequest) -> AsyncGenerator[TokenChunk, None]:
        self.running.add(request.request_id)
        admitted = self.live
        tokens: list[int] = []
        sent = 0
        chunk_tokens = 1 if request.stream else request.chunk_tokens or request.max_tokens
        labels: list[LabelSpan] = []
        finish = Finish.LENGTH
        try:
            while len(tokens) < request.max_tokens:
                await asyncio.sleep(0)
                await self._thawed.wait()
                label = str(self.live)
                if not labels or labels[-1].label != label:
                    labels.append(LabelSpan(label, len(tokens), len(tokens)))
                tokens.append(self._next_token(label, [*request.prompt_token_ids, *tokens]))
                labels[-1] = labels[-1]._replace(end=len(tokens))
                if tokens[-1] in request.stop_token_ids:
                    finish = Finish.STOP
                    break
                if len(tokens) - sent >= chunk_tokens and len(tokens) < request.max_tokens:
                    chunk = TokenChunk(
                        token_ids=tokens[sent:],
                        logprobs=[-1.0] * chunk_tokens,
                        routes=_new_routes(request, tokens, sent),
                    )
                    sent = len(tokens)
                    if not request.stream:
                        chunk = replace(chunk, labels=list(labels), admitted=admitted)
                    yield chunk
        finally:
            self.running.discard(request.request_id)
        last = tokens[sent:]
        yield TokenChunk(
            token_ids=last,
            logprobs=[-1.0] * len(last),
            finish=finish,
            labels=labels,
            admitted=admitted,
            routes=_new_routes(request, tokens, sent),
        )

    def _next_token(self, label: str, prefix: Sequence[int]) -> int:
        digest = hashlib.sha256(f"{label}:{prefix}".encode()).digest()
        return int.from_bytes(digest[:4], "little") % self.info.vocab_size


ROUTE_LAYERS, ROUTE_CHOICES, EXPERTS = 2, 2, 4


def route_tokens(token_ids: Sequence[int]) -> ExpertIds:
    """Experts that the fake engine's tokens take. [P, M, k]."""
    ids = np.asarray(token_ids)[:, None, None] + np.arange(ROUTE_LAYERS)[:, None]
    found: ExpertIds = ((ids + np.arange(ROUTE_CHOICES)) % EXPERTS).astype(np.uint8)
    return found


def _new_routes(request: SampleRequest, tokens: Sequence[int], sent: int) -> RouteRows | None:
    """Experts of the tokens behind those that were sent, but not of the newest."""
    if request.routes_from is None:
        return None
    whole = [*request.prompt_token_ids, *tokens]
    start = len(request.prompt_token_ids) + sent - 1 if sent else request.routes_from
    return RouteRows(start, route_tokens(whole[start:-1]))
