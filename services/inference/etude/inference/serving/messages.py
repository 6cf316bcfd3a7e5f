"""Messages of the wire: checked sampling requests, and the policy spans of a completion."""

import math
from collections.abc import Sequence

from etude.common.errors import InvalidFieldError
from etude.common.weights import VersionId
from etude.inference.engine.interface import EngineInfo, LabelSpan, SampleRequest
from etude.v1 import inference_pb2, weights_pb2

MAX_ID_CHARS = 256


def sample_request(request: inference_pb2.GenerateRequest, info: EngineInfo) -> SampleRequest:
    """The request with every field checked against the engine's limits.

    Raises:
        InvalidFieldError: names the first invalid field and its limit.
    """
    sampling = request.sampling
    if not 0 < len(request.request_id) <= MAX_ID_CHARS:
        raise InvalidFieldError("request_id", f"must have 1 to {MAX_ID_CHARS} characters")
    if len(request.episode) > MAX_ID_CHARS:
        raise InvalidFieldError("episode", f"must have at most {MAX_ID_CHARS} characters")
    prompt = list(request.prompt_token_ids)
    if not prompt:
        raise InvalidFieldError("prompt_token_ids", "is empty; a completion needs a prefix")
    _check_tokens("prompt_token_ids", prompt, info)
    _check_tokens("sampling.stop_token_ids", list(sampling.stop_token_ids), info)
    if sampling.max_tokens < 1:
        raise InvalidFieldError("sampling.max_tokens", f"is {sampling.max_tokens}, must be >= 1")
    total = len(prompt) + sampling.max_tokens
    if total > info.max_model_len:
        raise InvalidFieldError(
            "sampling.max_tokens",
            f"{len(prompt)} prompt tokens + {sampling.max_tokens} is {total}, "
            f"more than the engine's {info.max_model_len}",
        )
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidFieldError(
            "sampling.temperature", f"is {sampling.temperature}, must be finite and >= 0"
        )
    if request.message_tokens < 0:
        raise InvalidFieldError("message_tokens", f"is {request.message_tokens}, must be >= 0")
    routes_from = request.routes_from if request.HasField("routes_from") else None
    _check_routes_from(routes_from, len(prompt), info)
    return SampleRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop_token_ids=tuple(sampling.stop_token_ids),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stream=request.stream,
        chunk_tokens=request.message_tokens,
        rollout=request.episode,
        routes_from=routes_from,
    )


def _check_routes_from(routes_from: int | None, num_prompt: int, info: EngineInfo) -> None:
    if routes_from is None:
        return
    if not info.records_routes:
        raise InvalidFieldError(
            "routes_from", f"this engine records no experts of {info.model}; leave it unset"
        )
    if not 0 <= routes_from <= num_prompt:
        raise InvalidFieldError(
            "routes_from", f"is {routes_from}, must be 0 to {num_prompt}, the length of the prompt"
        )


def _check_tokens(field: str, token_ids: list[int], info: EngineInfo) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < info.vocab_size:
            raise InvalidFieldError(
                f"{field}[{index}]",
                f"is {token_id}, outside the vocabulary of {info.vocab_size}; "
                "is this the tokenizer of the served model?",
            )


def policy_spans(
    labels: Sequence[LabelSpan],
    *,
    admitted: VersionId,
    num_tokens: int,
    recomputes: bool = False,
    replica: str = "",
) -> list[weights_pb2.PolicySpan]:
    """Spans of one completion: adjacent, non-empty, covering [0, num_tokens).

    A request shares cached prefixes only with requests admitted under the same version, so that
    version is the oldest whose KV entries its tokens can have attended to.

    Args:
        labels: the engine's, in token order.
        admitted: version that was live when the request entered the engine.
        num_tokens: tokens of the completion.
        recomputes: whether every swap makes all requests recompute their KV entries.
        replica: the engine process that sampled them.

    Raises:
        ValueError: the labels have a gap, or one is not a version.
    """
    spans = []
    position = 0
    oldest = admitted
    for label in labels:
        if label.start != position or label.end <= label.start:
            raise ValueError(f"labels {list(labels)} do not cover the completion without gaps")
        position = label.end
        sampled = VersionId.parse(label.label)
        # After a roll-back the sampled version may be the oldest so far, and its entries stay.
        oldest = sampled if recomputes else min(oldest, sampled, key=lambda each: each.number)
        spans.append(
            weights_pb2.PolicySpan(
                sampled=sampled.to_proto(),
                context=oldest.to_proto(),
                start=label.start,
                end=label.end,
                replica=replica,
            )
        )
    if position != num_tokens:
        raise ValueError(f"labels {list(labels)} do not cover {num_tokens} tokens")
    return spans
