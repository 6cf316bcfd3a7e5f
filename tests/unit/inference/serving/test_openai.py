"""The door before the OpenAI application."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest

from etude.inference.serving.openai import HttpServer, PolicyVersionMiddleware, Receive, Scope, Send


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers everything, and takes part in the server's lifespan."""
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture
async def versions() -> list[str | None]:
    return ["3.128"]


@pytest.fixture
async def client(versions: list[str | None]) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(PolicyVersionMiddleware(hello, lambda: versions[0]), "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        yield client
    await server.stop(5)


async def test_an_answer_names_the_policy_version(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models")
    assert (answer.status_code, answer.text) == (200, "hello")
    assert answer.headers["x-policy-version"] == "3.128"


async def test_a_folders_own_weights_have_no_policy_version(
    client: httpx.AsyncClient, versions: list[str | None]
) -> None:
    versions[0] = ""
    assert "x-policy-version" not in (await client.get("/v1/models")).headers


async def test_nothing_is_served_before_the_first_version(
    client: httpx.AsyncClient, versions: list[str | None]
) -> None:
    versions[0] = None
    answer = await client.post("/v1/chat/completions", json={})
    assert answer.status_code == 503
    assert "no verified policy version" in json.loads(answer.text)["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/scale_elastic_ep", "/pause", "/v1/models/", "/metrics"])
async def test_a_path_that_we_do_not_serve_is_refused(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.post(path)).status_code == 404


async def test_an_answer_without_end_is_cut_off_after_the_grace_period() -> None:
    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await hello(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.Event().wait()

    server = HttpServer(streams, "127.0.0.1", 0)
    await server.start()
    async with httpx.AsyncClient() as client:
        request = client.build_request("GET", f"http://127.0.0.1:{server.port}/")
        answer = await client.send(request, stream=True)
        await server.stop(0)
        with pytest.raises(httpx.RemoteProtocolError):
            await answer.aread()


async def test_a_port_in_use_is_an_error_and_not_a_second_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = HttpServer(hello, "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            await server.start()
