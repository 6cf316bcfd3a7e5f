"""Turns of clients whose engines end, hang or are away."""

import asyncio
from typing import Any

import httpx2
import openai
import pytest
from prometheus_client import REGISTRY
from tests.support.gateway.openai_client import client_of
from tests.support.gateway.served import MODEL, ServedGateway

from etude.agent.chat import ChatFormat
from etude.gateway import http_exchange

ASK: Any = [{"role": "user", "content": "Fix it."}]


async def test_a_turn_goes_on_where_an_engine_ends(serve: Any, plain: ChatFormat) -> None:
    text = "A long turn, said by two engines, one after the other."
    async with serve(plain, lambda _: text, engines=2) as gateway:
        for engine in gateway.engines:
            engine.aborts = 1
        stream = await client_of(gateway).chat.completions.create(
            model=MODEL, messages=ASK, stream=True, temperature=0, seed=5
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == text
        requests = [each for engine in gateway.engines for each in engine.requests]
        assert len(requests) == 2
        assert len({each.sampling.seed for each in requests}) == 2
        (record,) = await gateway.records()
        assert [*record.token_ids] == plain.completion(text)


@pytest.mark.parametrize("outage_s", [1])
async def test_without_engines_the_client_is_told_to_come_again(
    gateway: ServedGateway,
) -> None:
    await gateway.servers[0].stop(0)
    with pytest.raises(openai.InternalServerError) as caught:
        await client_of(gateway).chat.completions.create(model=MODEL, messages=ASK)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("outage_s", [1])
async def test_an_engine_that_hangs_fails_its_turn_within_the_outage_limit(
    serve: Any, plain: ChatFormat
) -> None:
    async with serve(plain, lambda _: "A turn that never ends.") as gateway:
        gateway.engines[0].holds = True
        with pytest.raises(openai.APIError, match="no engine samples"):
            await listen(client_of(gateway), is_streamed=True)
        await gateway.engines[0].is_cancelled.wait()


@pytest.mark.parametrize("outage_s", [4])
@pytest.mark.parametrize("silent", [0, 1])
async def test_another_engine_is_asked_where_one_describes_nothing(
    serve: Any, plain: ChatFormat, silent: int
) -> None:
    async with serve(plain, lambda _: "Yes.", engines=2) as gateway:
        gateway.engines[silent].is_silent = True
        answer = await client_of(gateway).chat.completions.create(model=MODEL, messages=ASK)
        assert answer.choices[0].message.content == "Yes."


def count_requests(code: str) -> float:
    """Requests with an outcome that the stable arm has served so far."""
    labels = {"arm": "stable", "code": code}
    return REGISTRY.get_sample_value("etude_gateway_requests_total", labels) or 0.0


def count_abandoned() -> float:
    labels = {"arm": "stable"}
    return REGISTRY.get_sample_value("etude_gateway_abandoned_turns_total", labels) or 0.0


async def listen(client: openai.AsyncOpenAI, *, is_streamed: bool) -> None:
    answer: Any = await client.chat.completions.create(
        model=MODEL, messages=ASK, stream=is_streamed
    )
    async for _ in answer:
        pass


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_goes_away_ends_its_turn(
    serve: Any, plain: ChatFormat, *, is_streamed: bool
) -> None:
    async with serve(plain, lambda _: "A turn that nobody hears.") as gateway:
        engine = gateway.engines[0]
        engine.holds = True
        client = client_of(gateway).with_options(timeout=0.5)
        before = count_requests("499"), count_abandoned()
        with pytest.raises(openai.APITimeoutError):
            await listen(client, is_streamed=is_streamed)
        await engine.is_cancelled.wait()
        assert await gateway.records() == []
        while count_requests("499") == before[0]:  # noqa: ASYNC110 - the count tells no test
            await asyncio.sleep(0.01)
        assert count_abandoned() == before[1] + 1


async def test_a_silent_stream_gives_signs_of_life(
    serve: Any, plain: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "KEEP_ALIVE_S", 0.05)
    async with serve(plain, lambda _: "A turn that never ends.") as gateway:
        gateway.engines[0].holds = True
        body = {"model": MODEL, "messages": ASK, "stream": True}
        async with (
            httpx2.AsyncClient(headers={"authorization": f"Bearer {gateway.key}"}) as client,
            client.stream("POST", f"{gateway.url}/v1/chat/completions", json=body) as answer,
        ):
            signs = 0
            async for line in answer.aiter_lines():
                signs += line == ": keep-alive"
                if signs == 2:
                    break
    assert signs == 2


@pytest.mark.parametrize("outage_s", [1])
async def test_a_stream_that_fails_counts_as_a_failure(gateway: ServedGateway) -> None:
    answered = count_requests("200")
    await listen(client_of(gateway), is_streamed=True)
    while count_requests("200") == answered:  # noqa: ASYNC110 - it is counted after its last byte
        await asyncio.sleep(0.01)
    before = count_requests("200"), count_requests("503"), count_abandoned()
    await gateway.servers[0].stop(0)
    with pytest.raises(openai.APIError, match="no engine samples"):
        await listen(client_of(gateway), is_streamed=True)
    while count_requests("503") == before[1]:  # noqa: ASYNC110 - the count tells no test
        await asyncio.sleep(0.01)
    after = count_requests("200"), count_requests("503"), count_abandoned()
    assert after == (before[0], before[1] + 1, before[2] + 1)
