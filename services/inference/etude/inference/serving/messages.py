"""Validation of sampling requests against an engine's limits."""

import math

from etude.common.errors import InvalidFieldError
from etude.inference.policy import EngineInfo, SampleRequest
from etude.v1 import inference_pb2

MAX_ID_CHARS = 256


def checked(request: inference_pb2.GenerateRequest, info: EngineInfo) -> SampleRequest:
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
    return SampleRequest(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop_token_ids=tuple(sampling.stop_token_ids),
        seed=sampling.seed if sampling.HasField("seed") else None,
        stream=request.stream,
        episode=request.episode,
    )


def _check_tokens(field: str, token_ids: list[int], info: EngineInfo) -> None:
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < info.vocab_size:
            raise InvalidFieldError(
                f"{field}[{index}]",
                f"is {token_id}, outside the vocabulary of {info.vocab_size}; "
                "is this the tokenizer of the served model?",
            )
