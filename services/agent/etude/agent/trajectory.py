"""Trajectory of a rollout: exact tokens, their authorship, tool calls, costs and ending."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from etude.common.routed_experts import ExpertIds, RouteDraft, RouteRows
from etude.common.weights import VersionId

MAX_RESULT_BYTES = 4096
"""Bytes of a result that a call record keeps, of a longer one its beginning and its end."""
_LAST_BYTES = 1024
_OMITTED = "\n…\n".encode()


class RolloutEnding(IntEnum):
    """Reason for a rollout's end; the numbers are those of the wire. Faults have none."""

    STOPPED = 1
    """The policy ended its work."""
    LENGTH_LIMIT = 2
    TURN_LIMIT = 3
    TIME_LIMIT = 4


class PolicySpan(NamedTuple):
    """Tokens [start, end) and the weights that sampled them."""

    start: int
    end: int
    sampled: VersionId
    """Weights of the forward passes whose logits were sampled."""
    context: VersionId
    """Oldest weights whose keys and values those tokens attended to."""
    replica: str = ""
    """The engine process that sampled them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLink:
    """One context: a token sequence in which nothing was ever re-tokenised. T tokens."""

    token_ids: Sequence[int]
    """[T]"""
    loss_mask: bytes
    """1 where the policy sampled the token, else 0. [T]"""
    sampler_logprobs: Sequence[float]
    """Read only where the mask is 1. [T]"""
    spans: Sequence[PolicySpan]
    """Cover exactly the sampled tokens."""
    routes: ExpertIds | None = None
    """Experts that each token took in the engine; None where none were recorded. [T, M, k]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One tool call, for reports and behaviour statistics."""

    turn: int
    name: str
    """Empty when the call was malformed."""
    arguments_json: str
    result: str
    is_error: bool
    is_malformed: bool
    """It could not run: malformed, unknown, or wrong arguments."""


@dataclass(slots=True, kw_only=True)
class RolloutCosts:
    """Costs of the rollout so far; the three token counts add up to its transcript."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    tool_output_tokens: int = 0
    thinking_tokens: int = 0
    """Of the completion tokens, those of thinking."""
    final_message_tokens: int = 0
    """Of the completion tokens, those outside of thinking in completions without calls."""
    summary_tokens: int = 0
    """Of the completion tokens, those outside of thinking in summaries of a context."""
    tool_calls: int = 0
    malformed_calls: int = 0
    turns: int = 0
    tool_seconds: float = 0.0
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished rollout."""

    links: tuple[ContextLink, ...]
    costs: RolloutCosts
    ending: RolloutEnding
    final_message: str = ""
    """The last completion's text, or the message of finish."""
    calls: tuple[CallRecord, ...] = ()

    @property
    def oldest(self) -> VersionId | None:
        """Oldest version that touched any token; None if nothing was sampled."""
        return min((span.context for link in self.links for span in link.spans), default=None)

    @property
    def newest(self) -> VersionId | None:
        """Newest version that sampled any token; None if nothing was sampled."""
        return max((span.sampled for link in self.links for span in link.spans), default=None)


@dataclass(slots=True)
class LinkDraft:
    """A link under construction."""

    token_ids: list[int]
    loss_mask: bytearray
    sampler_logprobs: list[float]
    spans: list[PolicySpan]
    routes: RouteDraft = field(default_factory=RouteDraft)

    @classmethod
    def start(cls, prompt: Sequence[int]) -> "LinkDraft":
        """A link that starts with the harness's prompt."""
        draft = cls([], bytearray(), [], [])
        draft.append_read(prompt)
        return draft

    def append_read(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy reads."""
        self.token_ids += token_ids
        self.loss_mask += bytes(len(token_ids))
        self.sampler_logprobs += [0.0] * len(token_ids)

    def append_sampled(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[PolicySpan],
        routes: RouteRows | None = None,
    ) -> None:
        """Append tokens that the policy sampled; the spans count from the first of them."""
        offset = len(self.token_ids)
        self.token_ids += token_ids
        self.loss_mask += b"\x01" * len(token_ids)
        self.sampler_logprobs += logprobs
        for span in spans:
            self.spans.append(span._replace(start=span.start + offset, end=span.end + offset))
        if routes is not None:
            self.routes.add(routes)

    def finish(self) -> ContextLink:
        """The finished link, with the wire's types: lists of Python's numbers take 8x as much."""
        routes = self.routes.pad_to(len(self.token_ids))
        return ContextLink(
            token_ids=array("i", self.token_ids),
            loss_mask=bytes(self.loss_mask),
            sampler_logprobs=array("f", self.sampler_logprobs),
            spans=self.spans,
            routes=None if routes is None else routes.ids,
        )


def cut_text(text: str) -> str:
    """Text for a call record: of a long one both ends, as exit codes and totals stand last."""
    data = text[: MAX_RESULT_BYTES + 1].encode()
    if len(data) <= MAX_RESULT_BYTES:
        return text
    end = text[-_LAST_BYTES:].encode()[-_LAST_BYTES:]
    first = data[: MAX_RESULT_BYTES - _LAST_BYTES - len(_OMITTED)]
    return (first + _OMITTED + end).decode("utf-8", "ignore")
