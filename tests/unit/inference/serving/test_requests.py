"""A request that the engine cannot take is refused by the name of the field."""

from typing import Any

import pytest

from etude.common.errors import InvalidFieldError
from etude.inference.engine.interface import EngineInfo
from etude.inference.serving import messages
from etude.v1 import inference_pb2


def request(
    request_id: str = "r", prompt: list[int] | None = None, **sampling: Any
) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3] if prompt is None else prompt,
        sampling=inference_pb2.Sampling(**{"max_tokens": 4, **sampling}),
    )


def test_a_valid_request_keeps_every_field(info: EngineInfo) -> None:
    wire = request(temperature=0.5, stop_token_ids=[7], seed=0)
    found = messages.sample_request(wire, info)
    assert (found.prompt_token_ids, found.max_tokens, found.temperature) == ([1, 2, 3], 4, 0.5)
    assert (found.stop_token_ids, found.seed, found.stream) == ((7,), 0, False)


def test_an_unset_seed_stays_unset(info: EngineInfo) -> None:
    assert messages.sample_request(request(), info).seed is None


@pytest.mark.parametrize(
    ("wire", "field", "complaint"),
    [
        (request(request_id=""), "request_id", "1 to 256"),
        (request(request_id="x" * 257), "request_id", "1 to 256"),
        (request(prompt=[]), "prompt_token_ids", "empty"),
        (request(prompt=[1, 100]), "prompt_token_ids[1]", "outside the vocabulary of 100"),
        (request(prompt=[-1]), "prompt_token_ids[0]", "outside the vocabulary"),
        (request(stop_token_ids=[100]), "sampling.stop_token_ids[0]", "outside the vocabulary"),
        (request(max_tokens=0), "sampling.max_tokens", "must be >= 1"),
        (request(max_tokens=-1), "sampling.max_tokens", "must be >= 1"),
        (request(max_tokens=30), "sampling.max_tokens", "3 prompt tokens + 30 is 33"),
        (
            request(prompt=[1] * 32, max_tokens=1),
            "sampling.max_tokens",
            "more than the engine's 32",
        ),
        (request(temperature=-0.1), "sampling.temperature", "finite and >= 0"),
        (request(temperature=float("nan")), "sampling.temperature", "finite and >= 0"),
        (request(temperature=float("inf")), "sampling.temperature", "finite and >= 0"),
    ],
)
def test_what_cannot_be_sampled_is_named(
    info: EngineInfo, wire: inference_pb2.GenerateRequest, field: str, complaint: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        messages.sample_request(wire, info)
    assert caught.value.field == field
    assert complaint in caught.value.what


def test_a_request_that_fills_the_context_exactly_is_taken(info: EngineInfo) -> None:
    assert messages.sample_request(request(prompt=[1] * 28, max_tokens=4), info).max_tokens == 4
