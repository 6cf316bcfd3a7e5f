"""The tests' own client of an API server tells refusals, gone objects and events apart."""

from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.support.kube.api_client import ApiClient, RefusedError, Reply, retry_until_answered
from tests.support.kube.api_servers import FORBIDDEN, KEY, POD, PODS, ApiServer, listing, pod
from tests.support.kube.controllers.client import Client


@pytest.fixture
async def server() -> Any:
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as session:
        yield server, ApiClient(session, f"http://{host}:{port}")
    await runner.cleanup()


async def test_a_refusal_is_an_error_with_the_servers_words(server: Any) -> None:
    api, client = server
    api.answers[f"PATCH {POD}"] = [FORBIDDEN]
    with pytest.raises(RefusedError, match='403 pods "p" is forbidden'):
        await client.merge(KEY, {"metadata": {}})
    assert api.requests == [("PATCH", POD, {"metadata": {}})]


async def test_an_object_that_is_gone_is_deleted(server: Any) -> None:
    api, client = server
    await client.delete(KEY, gracePeriodSeconds=0)
    api.answers[f"DELETE {POD}"] = [FORBIDDEN]
    with pytest.raises(RefusedError):
        await client.delete(KEY)


async def test_plain_text_is_a_message_and_text_is_sent_as_it_is(server: Any) -> None:
    api, client = server
    api.answers[f"PUT {POD}"] = [(503, "starting")]
    reply = await client.request("PUT", POD, '{"a": 1.0}', as_user="other")
    assert (reply.status, reply.body, reply.is_good) == (503, {"message": "starting"}, False)
    assert api.requests == [("PUT", POD, {"a": 1.0})]
    causes = {"message": "no", "details": {"causes": [{"field": "spec.x"}]}}
    assert Reply(422, causes).message == "no [spec.x]"


async def test_a_watch_yields_its_events_until_the_server_ends_it(server: Any) -> None:
    api, client = server
    events = [{"type": "ADDED", "object": pod(5)}, {"type": "MODIFIED", "object": pod(6)}]
    api.watches = [events]
    assert [event async for event in client.watch(PODS, resourceVersion="4")] == events
    assert "resourceVersion=4" in api.requests[0][1]
    api.watch_status = 410
    with pytest.raises(RefusedError, match="410"):
        await anext(client.watch(PODS))


async def test_a_count_reads_one_object_and_what_remains(server: Any) -> None:
    api, client = server
    first = {"metadata": {"remainingItemCount": 41}, "items": [pod(1)]}
    api.answers[f"GET {PODS}"] = [(200, first), listing(3)]
    assert [await client.count(PODS), await client.count(PODS)] == [42, 0]


async def test_a_call_is_repeated_until_the_server_has_started(server: Any) -> None:
    api, client = server
    api.answers[f"GET {POD}"] = [(503, "starting"), (200, pod(1))]
    await retry_until_answered(lambda: client.call("GET", POD))
    assert len(api.requests) == 2
    api.answers[f"GET {POD}"] = [(404, {})]
    with pytest.raises(RefusedError, match="404"):
        await retry_until_answered(lambda: client.call("GET", POD))


async def test_a_stand_in_tolerates_changed_objects_and_no_refusals(server: Any) -> None:
    api, client = server
    stand_in = Client(client)
    assert (await stand_in.get(POD), await stand_in.every(PODS)) == (None, [])
    await stand_in.patch(POD, {})
    api.answers[f"PATCH {POD}"] = api.answers[f"POST {PODS}"] = [FORBIDDEN]
    with pytest.raises(ValueError, match="forbidden"):
        await stand_in.patch(POD, {})
    with pytest.raises(ValueError, match="forbidden"):
        await stand_in.create(PODS, pod(1))
