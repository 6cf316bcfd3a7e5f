"""What the services need from an engine, and an engine in memory for tests."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

from typing_extensions import override

from etude.common.errors import CorruptError
from etude.common.weights import VersionId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The fixed properties of an engine."""

    model: str
    """Name on the OpenAI-compatible endpoint."""
    vocab_size: int
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    max_concurrent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One exact token prefix to continue; valid once built by `requests.checked`."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    temperature: float
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    stream: bool = False


class Finish(Enum):
    """Why sampling ended."""

    STOP = "a stop token was sampled"
    LENGTH = "max_tokens or the context limit was reached"
    ABORT = "the engine gave the request up"


class LabelSpan(NamedTuple):
    """Output tokens [start, end) were sampled by the weights labelled so."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New tokens of one completion; the last piece says how it ended and under which weights."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish | None = None
    labels: Sequence[LabelSpan] = ()
    """Of the whole completion; only in the last piece."""
    admitted: VersionId | None = None
    """Version that was live when the request entered the engine; only in the last piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVersion:
    """A version on local disk, every byte verified."""

    version: VersionId
    files: Sequence[Path]
    """Safetensors containers."""


class PolicyEngine(Protocol):
    """Samples tokens and swaps weights between two forward passes."""

    info: EngineInfo

    @property
    def live(self) -> VersionId | None:
        """The version that new requests are admitted under; None before the first commit."""

    @property
    def failed(self) -> str:
        """Why the engine cannot go on; empty while it can."""

    def generate(self, request: SampleRequest) -> AsyncGenerator[Piece, None]:
        """Continue one prefix; closing the generator frees its slot."""

    async def commit(self, staged: StagedVersion) -> float:
        """Make a version live while requests are frozen.

        Returns:
            How long the requests were frozen, in seconds.

        Raises:
            CorruptError: the tensors do not fit the model; the old weights stay.
        """


@dataclass(slots=True)
class MemoryEngine(PolicyEngine):
    """Samples a token per event-loop turn by hashing the prefix and the live version."""

    info: EngineInfo
    live: VersionId | None = None
    failed: str = ""
    refuses: frozenset[VersionId] = frozenset()
    """Versions whose tensors do not fit."""
    running: set[str] = field(default_factory=set)
    committed: list[VersionId] = field(default_factory=list)

    @override
    async def generate(self, request: SampleRequest) -> AsyncGenerator[Piece, None]:
        self.running.add(request.request_id)
        admitted = self.live
        tokens: list[int] = []
        labels: list[LabelSpan] = []
        finish = Finish.LENGTH
        try:
            while len(tokens) < request.max_tokens:
                await asyncio.sleep(0)
                label = str(self.live)
                if not labels or labels[-1].label != label:
                    labels.append(LabelSpan(label, len(tokens), len(tokens)))
                tokens.append(self._next(label, [*request.prompt_token_ids, *tokens]))
                labels[-1] = labels[-1]._replace(end=len(tokens))
                if tokens[-1] in request.stop_token_ids:
                    finish = Finish.STOP
                    break
                if request.stream and len(tokens) < request.max_tokens:
                    yield Piece(token_ids=tokens[-1:], logprobs=[-1.0])
        finally:
            self.running.discard(request.request_id)
        last = tokens[-1:] if request.stream else tokens
        yield Piece(
            token_ids=last,
            logprobs=[-1.0] * len(last),
            finish=finish,
            labels=labels,
            admitted=admitted,
        )

    def _next(self, label: str, prefix: Sequence[int]) -> int:
        digest = hashlib.sha256(f"{label}:{prefix}".encode()).digest()
        return int.from_bytes(digest[:4], "little") % self.info.vocab_size

    @override
    async def commit(self, staged: StagedVersion) -> float:
        if staged.version in self.refuses:
            raise CorruptError(f"version {staged.version}: the tensors do not fit the model")
        await asyncio.sleep(0)
        self.live = staged.version
        self.committed.append(staged.version)
        return 0.0
