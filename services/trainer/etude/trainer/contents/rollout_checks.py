"""Validation of finished rollouts: their tokens, and the versions that these claim. Pure."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from etude.common.errors import InvalidFieldError
from etude.common.weights import VersionId
from etude.v1 import rollout_pb2, weights_pb2

PositionOf = Callable[[VersionId], int | None]
"""The position of a version along the accepted chain; None for one that was never published."""


class InvalidSpanError(InvalidFieldError):
    """The weights that produced a rollout's tokens are unknown: it must not be trained."""

    reason = "InvalidSpan"


def check_rollout(
    rollout: rollout_pb2.Rollout, *, vocab_size: int, max_tokens: int, position_of: PositionOf
) -> None:
    """Refuse a rollout that cannot be trained on, before it is acknowledged.

    A sampled token without a finite log-prob is no reason: the learner removes that token alone.

    Args:
        rollout: as it came over the wire.
        vocab_size: of the model.
        max_tokens: most that one link may have; the model takes as many.
        position_of: position of a version along the accepted chain.

    Raises:
        InvalidSpanError: the versions of its tokens are impossible.
        InvalidFieldError: another field is invalid; it is named.
    """
    if not rollout.links:
        raise InvalidFieldError("links", "a finished rollout needs at least one")
    for place, link in enumerate(rollout.links):
        _check_link(link, f"links[{place}]", vocab_size=vocab_size, max_tokens=max_tokens)
    check_spans(rollout, position_of=position_of)


def _check_link(link: rollout_pb2.Link, where: str, *, vocab_size: int, max_tokens: int) -> None:
    tokens = len(link.token_ids)
    if not 0 < tokens <= max_tokens:
        raise InvalidFieldError(f"{where}.token_ids", f"{tokens} tokens, not 1 to {max_tokens}")
    if len(link.loss_mask) != tokens or len(link.sampler_logprobs) != tokens:
        raise InvalidFieldError(
            where,
            f"{tokens} tokens, {len(link.loss_mask)} mask bytes,"
            f" {len(link.sampler_logprobs)} log-probs: lengths must be equal",
        )
    # A view of the message's memory: a search of Python numbers is forty times as long.
    ids = np.asarray(link.token_ids)
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidFieldError(f"{where}.token_ids", f"an id is outside [0, {vocab_size})")
    mask = np.frombuffer(link.loss_mask, dtype=np.uint8)
    if mask.max() > 1:
        raise InvalidFieldError(f"{where}.loss_mask", "a byte is neither 0 nor 1")
    if mask[0]:
        raise InvalidFieldError(f"{where}.loss_mask", "the first token has nothing before it")


def check_spans(rollout: rollout_pb2.Rollout, *, position_of: PositionOf) -> None:
    """Refuse a rollout whose spans break the contract.

    In each link spans are in token order, not empty, contiguous, and cover exactly the sampled
    tokens; no context is newer than the weights that sampled; every version was published; and the
    rollout is as old as its oldest context.

    Raises:
        InvalidSpanError: naming the field.
    """
    for place, link in enumerate(rollout.links):
        where = f"links[{place}].spans"
        mask = np.frombuffer(link.loss_mask, dtype=np.uint8) != 0
        _check_cover(link.spans, mask, where)
        for span in link.spans:
            _check_versions(span, where, position_of)
            if span.context.number < rollout.oldest.number:
                raise InvalidSpanError("oldest", f"{where} has a context before it")
    if position_of(VersionId.from_proto(rollout.oldest)) is None:
        raise InvalidSpanError("oldest", "names a version that was never published")


def _check_cover(
    spans: Sequence[weights_pb2.PolicySpan], mask: NDArray[np.bool_], where: str
) -> None:
    at = 0
    for span in spans:
        due = _next_sampled(mask, at)
        if span.start != due or not span.start < span.end <= len(mask):
            raise InvalidSpanError(where, f"[{span.start}, {span.end}) does not start at {due}")
        if not mask[span.start : span.end].all():
            raise InvalidSpanError(
                where, f"[{span.start}, {span.end}) covers tokens that were not sampled"
            )
        at = span.end
    if mask[at:].any():
        raise InvalidSpanError(where, f"do not cover the token {_next_sampled(mask, at)}")


def _next_sampled(mask: NDArray[np.bool_], at: int) -> int:
    """The first sampled token from a position on; the number of tokens if there is none."""
    rest = mask[at:]
    return at + int(rest.argmax()) if rest.any() else len(mask)


def _check_versions(span: weights_pb2.PolicySpan, where: str, position_of: PositionOf) -> None:
    sampled, context = VersionId.from_proto(span.sampled), VersionId.from_proto(span.context)
    for version in (sampled, context):
        if position_of(version) is None:
            raise InvalidSpanError(where, f"version {version} was never published")
    if context.number > sampled.number:
        raise InvalidSpanError(where, f"context {context} is newer than the weights {sampled}")
