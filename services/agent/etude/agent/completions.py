"""Completions of a sampler, and checks of their consistency."""

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import NamedTuple

from etude.agent.trajectory import PolicySpan
from etude.common.routed_experts import RouteRows

_LOGPROB_ROUNDING = 1e-3
"""A log-probability is at most 0, up to the rounding of a softmax in bfloat16."""


class FinishReason(IntEnum):
    """Reason for the end of sampling; the numbers are those of the wire."""

    STOP = 1
    """A token that ends turns was sampled."""
    LENGTH = 2
    """The limit of tokens was reached."""
    ABORT = 3
    """The request was cancelled."""


class Completion(NamedTuple):
    """The tokens of one turn. N tokens."""

    token_ids: Sequence[int]
    """The end of the turn included. [N]"""
    logprobs: Sequence[float]
    """Of each token, under the weights and the temperature it was sampled with; NaN or -inf where
    the sampler gave the token no probability. [N]"""
    spans: Sequence[PolicySpan]
    """Cover [0, N) in order."""
    finish: FinishReason
    routes: RouteRows | None = None
    """Experts of tokens of prompt and completion, by position in the context; None where none are
    recorded."""


def find_inconsistency(
    completion: Completion, *, max_tokens: int, vocab_size: int, end_ids: AbstractSet[int]
) -> str:
    """Find the first inconsistency of a completion, with its field; empty if there is none.

    Single tokens without a finite log-prob are consistent: the learner removes these alone.
    """
    ids, logprobs = completion.token_ids, completion.logprobs
    if not 0 < len(ids) <= max_tokens:
        return f"token_ids: {len(ids)} tokens where 1 to {max_tokens} were asked for"
    if len(logprobs) != len(ids):
        return f"logprobs: {len(logprobs)} for {len(ids)} tokens"
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        return f"token_ids: a token outside of the vocabulary of {vocab_size}"
    return (
        _wrong_logprobs(logprobs)
        or _wrong_end(completion, end_ids)
        or _wrong_spans(completion.spans, len(ids))
    )


def _wrong_logprobs(logprobs: Sequence[float]) -> str:
    # Not max(): what it makes of NaN depends on the order.
    if any(logprob > _LOGPROB_ROUNDING for logprob in logprobs):
        return "logprobs: one is no log-probability"
    if not any(map(math.isfinite, logprobs)):
        return "logprobs: none is finite, so the engine's weights or activations are broken"
    return ""


def _wrong_end(completion: Completion, end_ids: AbstractSet[int]) -> str:
    ids = completion.token_ids
    if not end_ids.isdisjoint(ids[:-1]):
        return "token_ids: sampling went on after the end of the turn"
    if ids[-1] not in end_ids and completion.finish is not FinishReason.LENGTH:
        return f"finish: {completion.finish.name} without the end of a turn"
    return ""


def _wrong_spans(spans: Sequence[PolicySpan], num_tokens: int) -> str:
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            return f"spans: [{span.start}, {span.end}) where one from {at} on was due"
        if span.context > span.sampled:
            return f"spans: context {span.context} is newer than the weights {span.sampled}"
        at = span.end
    return "" if at == num_tokens else f"spans: {at} of {num_tokens} tokens have a version"
