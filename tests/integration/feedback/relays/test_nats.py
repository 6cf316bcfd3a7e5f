"""Relays between a real NATS server and a service: nothing is lost, nothing counts twice."""

import asyncio
import json
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig
from tests.support.feedback import events as examples
from tests.support.feedback.process import FeedbackProcess
from tests.support.feedback.relays import DONE_S, Certificates, Relay, nats_server, post, until

from etude.feedback.relays.command import RelaySettings
from etude.feedback.relays.nats_streams import NatsSettings

STREAM, SUBJECT = "feedback", "etude.events"
NUM_EVENTS = 300


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with nats_server(tmp_path / "nats") as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name=STREAM, subjects=[SUBJECT])
    yield client
    await client.close()


def env(url: str, **more: str) -> dict[str, str]:
    return {
        "ETUDE_NATS_URL": url,
        "ETUDE_NATS_STREAM": STREAM,
        "ETUDE_NATS_SUBJECT": SUBJECT,
        **more,
    }


async def test_events_of_a_stream_are_stored_once_after_kills_of_both(
    client: Client, url: str, service: FeedbackProcess
) -> None:
    context = client.jetstream()
    # Its operator may make the consumer: this one delivers again after a second.
    again = ConsumerConfig(durable_name="etude-feedback", ack_policy=AckPolicy.EXPLICIT, ack_wait=1)
    await context.add_consumer(STREAM, again)
    for number in range(NUM_EVENTS):
        await context.publish(SUBJECT, examples.encoded(id=f"{number}", user=f"u{number % 7}"))
    for message in (b"\xff", b"[1]", b"", examples.encoded(id="no", granted=False), b"{}" * 2):
        await context.publish(SUBJECT, message)
    relay = Relay("from-nats", service, env(url))

    async def num_unsettled() -> int:
        found = await context.consumer_info(STREAM, "etude-feedback")
        return int(found.num_pending or 0) + int(found.num_ack_pending or 0)

    for round_ in range(3):
        await relay.start()
        limit = NUM_EVENTS - 90 * (round_ + 1)

        async def is_halfway(limit: int = limit) -> bool:
            return await num_unsettled() <= limit

        await until(is_halfway)
        await relay.stop(signal.SIGKILL)
        if round_ == 1:
            await service.stop(signal.SIGKILL)
            await service.start()
    await relay.start()
    await context.publish(SUBJECT, examples.encoded(id=f"{NUM_EVENTS}"))

    async def is_over() -> bool:
        return str(NUM_EVENTS) in await service.export() and await num_unsettled() == 0

    await until(is_over)
    assert await relay.stop(signal.SIGTERM) == 0
    stored = await service.export()
    assert sorted(stored, key=int) == [str(number) for number in range(NUM_EVENTS + 1)]


async def test_a_service_that_is_away_costs_no_event(
    client: Client, url: str, service: FeedbackProcess
) -> None:
    await service.stop(signal.SIGKILL)
    relay = Relay("from-nats", service, env(url))
    process = await relay.start()
    await client.jetstream().publish(SUBJECT, examples.encoded(id="1"))
    assert process.stderr is not None
    async with asyncio.timeout(DONE_S):
        while b"events wait" not in await process.stderr.readline():
            pass
    await service.start()

    async def is_stored() -> bool:
        return await service.export() == ["1"]

    await until(is_stored)
    assert await relay.stop(signal.SIGTERM) == 0


async def test_every_usable_event_is_published_once_and_in_order(
    client: Client, url: str, service: FeedbackProcess
) -> None:
    relays = [Relay("to-nats", service, env(url)) for _ in range(2)]
    for relay in relays:
        await relay.start()
    expected = []
    for batch in range(6):
        names = [f"{batch}-{number}" for number in range(40)]
        await post(service, names)
        expected += names
        await relays[batch % 2].stop(signal.SIGKILL)
        await relays[batch % 2].start()
    context = client.jetstream()

    async def is_whole() -> bool:
        return (await context.stream_info(STREAM)).state.messages >= len(expected)

    await until(is_whole)
    for relay in relays:
        assert await relay.stop(signal.SIGTERM) == 0
    found = await context.stream_info(STREAM)
    messages = [await context.get_msg(STREAM, n + 1) for n in range(found.state.last_seq)]
    assert [json.loads(message.data or b"")["id"] for message in messages] == expected
    sequences = [int((message.headers or {})["Etude-Sequence"]) for message in messages]
    assert sequences == sorted(set(sequences))


async def test_relays_reach_a_server_over_tls_that_they_can_prove(
    client: Client, url: str, tmp_path: Path, service: FeedbackProcess, relays: list[Relay]
) -> None:
    tls = Certificates.make(tmp_path / "certificates")
    trust = {"ETUDE_NATS_CA_FILE": str(tls.authority)}
    async with nats_server(tmp_path / "nats-tls", tls) as secure:
        context = ssl.create_default_context(cafile=tls.authority)
        sender = await nats.connect(secure, tls=context)
        await sender.jetstream().add_stream(name=STREAM, subjects=[SUBJECT])
        await sender.jetstream().publish(SUBJECT, examples.encoded(id="1"))
        await sender.close()
        relays.append(Relay("from-nats", service, env(secure, **trust)))
        await relays[0].start()

        async def is_stored() -> bool:
            return await service.export() == ["1"]

        await until(is_stored)
        plain = url.replace("nats://", "tls://")
        for address, access, problem in (
            (secure, {}, b"certificate verify failed"),
            (plain, trust, b"does not ask for TLS"),
        ):
            process = await Relay("from-nats", service, env(address, **access)).start()
            _, told = await asyncio.wait_for(process.communicate(), DONE_S)
            assert process.returncode == 78, told
            assert b"cannot be reached" in told
            assert problem in told


async def test_a_log_that_lost_its_newest_event_is_not_begun_again_unasked(
    client: Client, url: str, service: FeedbackProcess
) -> None:
    await post(service, ["1", "2"])
    await client.jetstream().publish(SUBJECT, b"{}", headers={"Etude-Sequence": "1"})
    await client.jetstream().purge_stream(STREAM)
    process = await Relay("to-nats", service, env(url)).start()
    _, told = await asyncio.wait_for(process.communicate(), DONE_S)
    assert process.returncode == 78
    assert b"fix: set ETUDE_RELAY_AFTER" in told
    relay = Relay("to-nats", service, env(url, ETUDE_RELAY_AFTER="0"))
    await relay.start()

    async def is_whole() -> bool:
        return (await client.jetstream().stream_info(STREAM)).state.messages == 2

    await until(is_whole)
    await relay.stop(signal.SIGTERM)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ETUDE_NATS_STREAM": "other"}, b"has no stream other"),
        ({"ETUDE_NATS_URL": "nats://127.0.0.1:1"}, b"cannot be reached"),
        ({"ETUDE_RELAY_KEY_FILE": "/no/key"}, b"ETUDE_RELAY_KEY_FILE"),
    ],
)
async def test_a_queue_or_key_that_is_not_there_is_named(
    client: Client, url: str, tmp_path: Path, change: dict[str, str], problem: bytes
) -> None:
    service = FeedbackProcess.prepare(tmp_path)
    process = await Relay("from-nats", service, env(url) | change).start()
    _, told = await asyncio.wait_for(process.communicate(), DONE_S)
    assert process.returncode == 78, told
    assert problem in told
    assert b"Traceback" not in told


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ETUDE_NATS_URL": "nats://queue.example.com:4222"}, "in the clear: use tls://"),
        ({"ETUDE_NATS_URL": "http://127.0.0.1:1"}, "is no nats://host:port"),
        ({"ETUDE_RELAY_URL": "http://feedback.example.com"}, "ETUDE_RELAY_URL: is not on this"),
        ({"ETUDE_RELAY_AFTER": "-1"}, "ETUDE_RELAY_AFTER"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, change: dict[str, str], problem: str) -> None:
    relay = Relay("to-nats", FeedbackProcess.prepare(tmp_path), env("nats://127.0.0.1:1"))
    with pytest.raises(ValueError, match=problem):
        (RelaySettings.from_env(relay.env | change), NatsSettings.from_env(relay.env | change))
