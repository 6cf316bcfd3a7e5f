"""What the services need from an engine."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from etude.common.weights import VersionId
from etude.inference.swap import Swap


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The fixed properties of an engine."""

    model: str
    """Name on the OpenAI-compatible endpoint."""
    vocab_size: int
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    max_concurrent: int
    recomputes_kv: bool = False
    """Whether running requests compute their KV cache anew at each swap."""


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
    episode: str = ""
    """What the request is a turn of; turns may share cached prefixes. Empty for nothing."""


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


class PolicyEngine(Protocol):
    """Samples tokens and swaps weights between two forward passes."""

    info: EngineInfo
    swap: Swap
    """Moves the live weights from version to version by what changed."""

    @property
    def live(self) -> VersionId | None:
        """The version that new requests are admitted under; None before the first commit."""

    @property
    def failed(self) -> str:
        """Why the engine cannot go on; empty while it can."""

    def generate(self, request: SampleRequest) -> AsyncGenerator[Piece, None]:
        """Continue one prefix; closing the generator frees its slot."""
