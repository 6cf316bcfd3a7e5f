"""The engine interface: requests, token chunks and the PolicyEngine protocol."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from etude.common.routed_experts import RouteRows
from etude.common.weights import VersionId
from etude.inference.swap.coordinator import SwapCoordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The fixed properties of an engine."""

    model: str
    """Name on the OpenAI-compatible endpoint."""
    vocab_size: int
    max_model_len: int
    """Longest prompt plus completion, in tokens."""
    max_concurrent: int
    recomputes_kv_cache: bool = False
    """True if running requests recompute their KV cache at each swap."""
    records_routes: bool = False
    """True if requests may ask for the experts of their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One exact token prefix to continue; valid once built by `messages.sample_request`."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    temperature: float
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    stream: bool = False
    chunk_tokens: int = 0
    """Without stream: tokens of one labelled chunk; 0 for one chunk at the end."""
    rollout: str = ""
    """Rollout that the request is a turn of, to share cached prefixes; empty for none."""
    routes_from: int | None = None
    """Position from which on the experts of tokens are asked for; None: of no token."""


class Finish(Enum):
    """Reason for the end of sampling."""

    STOP = "a stop token was sampled"
    LENGTH = "max_tokens or the context limit was reached"
    ABORT = "the engine aborted the request"


class LabelSpan(NamedTuple):
    """Output tokens [start, end), sampled by the weights with this label."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one completion; the last chunk has the finish reason."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: Finish | None = None
    labels: Sequence[LabelSpan] = ()
    """Of the completion up to and with this chunk; in a stream only in the last chunk."""
    admitted: VersionId | None = None
    """Version that was live when the request entered the engine; in chunks with labels."""
    routes: RouteRows | None = None
    """Experts of tokens that no chunk before has, if they were asked for. The newest token has
    none: the next forward pass processes it."""


class PolicyEngine(Protocol):
    """Samples tokens and swaps weights between two forward passes."""

    info: EngineInfo
    swap: SwapCoordinator
    """Swaps the live weights from version to version by their changes."""

    @property
    def live(self) -> VersionId | None:
        """Version that new requests are admitted under; None before the first activation."""

    @property
    def failed(self) -> str:
        """Reason of the failure that stopped the engine; empty while it works."""

    def generate(self, request: SampleRequest) -> AsyncGenerator[TokenChunk, None]:
        """Continue one prefix; closing the generator frees its slot."""
