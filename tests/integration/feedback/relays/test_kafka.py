"""Relays between a real Kafka broker and a service: nothing is lost, nothing counts twice."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from tests.support.feedback import events as examples
from tests.support.feedback.process import FeedbackProcess
from tests.support.feedback.relays import (
    DONE_S,
    PASSWORD,
    USER,
    Certificates,
    Relay,
    kafka_broker,
    post,
    until,
)

from etude.feedback.relays.kafka_topics import KafkaSettings

NUM_EVENTS = 300


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[str]:
    async with kafka_broker(tmp_path / "kafka") as broker:
        await make_topics(broker.plain)
        yield broker.plain


async def make_topics(servers: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    await admin.create_topics([NewTopic("in", 3, 1), NewTopic("out", 1, 1)])
    await admin.close()


def env(servers: str, topic: str, **more: str) -> dict[str, str]:
    return {"ETUDE_KAFKA_SERVERS": servers, "ETUDE_KAFKA_TOPIC": topic, **more}


async def read(servers: str, topic: str, *, wait_ms: int = 2_000) -> list[Any]:
    """All committed records of a topic of one partition."""
    partition = TopicPartition(topic, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=servers, isolation_level="read_committed")
    await consumer.start()
    consumer.assign([partition])
    await consumer.seek_to_beginning(partition)
    records: list[Any] = []
    while page := (await consumer.getmany(timeout_ms=wait_ms)).get(partition, []):
        records += page
    await consumer.stop()
    return records


async def test_events_of_a_topic_are_stored_once_after_kills_of_both(
    broker: str, service: FeedbackProcess, relays: list[Relay]
) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=broker)
    await producer.start()
    bad = (b"\xff", b"[1]", b"", examples.encoded(id="no", granted=False), b"{}" * 2)
    for number in range(NUM_EVENTS):
        event = examples.encoded(id=f"{number}", user=f"u{number % 7}")
        await producer.send("in", event, partition=number % 3)
        if number < len(bad):
            await producer.send("in", bad[number], partition=number % 3)
    await producer.flush()
    relays += [Relay("from-kafka", service, env(broker, "in")) for _ in range(2)]
    for relay in relays:
        await relay.start()

    async def is_halfway() -> bool:
        return len(await service.export()) >= NUM_EVENTS // 3

    await until(is_halfway)
    await service.stop(signal.SIGKILL)
    await relays[0].stop(signal.SIGKILL)
    await service.start()

    async def is_whole() -> bool:
        return len(await service.export()) >= NUM_EVENTS

    await until(is_whole)
    await producer.send_and_wait("in", examples.encoded(id=f"{NUM_EVENTS}"), partition=0)
    await producer.stop()

    async def is_over() -> bool:
        return str(NUM_EVENTS) in await service.export()

    await until(is_over)
    assert await relays[1].stop(signal.SIGTERM) == 0
    stored = await service.export()
    assert sorted(stored, key=int) == [str(number) for number in range(NUM_EVENTS + 1)]


async def test_one_relay_publishes_while_another_stands_by(
    broker: str, service: FeedbackProcess, relays: list[Relay]
) -> None:
    relays += [Relay("to-kafka", service, env(broker, "out")) for _ in range(2)]
    for relay in relays:
        await relay.start()
    reader = AIOKafkaConsumer("out", bootstrap_servers=broker, isolation_level="read_committed")
    await reader.start()
    await reader.seek_to_beginning()
    for number in range(6):
        if number == 4:  # whichever publishes, one of these two ends it
            assert await relays[0].stop(signal.SIGTERM) == 0
            await relays[0].start()
        if number == 5:
            assert await relays[1].stop(signal.SIGTERM) == 0
        await post(service, [f"{number}"])
        async with asyncio.timeout(DONE_S):
            record = await reader.getone()
        assert json.loads(record.value or b"")["id"] == f"{number}"
    await reader.stop()
    assert await relays[0].stop(signal.SIGTERM) == 0
    # Neither was refused by the broker: they do not end each other's transactions.
    assert not any("not published" in relay.told for relay in relays)


@pytest.mark.long
async def test_every_usable_event_is_published_once_and_in_order_after_kills(
    broker: str, service: FeedbackProcess, relays: list[Relay]
) -> None:
    relays += [Relay("to-kafka", service, env(broker, "out")) for _ in range(2)]
    for relay in relays:
        await relay.start()
    expected: list[str] = []
    for batch in range(4):
        before = len(expected)
        for part in range(10):
            names = [f"{batch}-{part}-{number}" for number in range(100)]
            await post(service, names)
            expected += names

        async def has_begun(before: int = before) -> bool:
            return len(await read(broker, "out", wait_ms=200)) > before

        await until(has_begun)
        # One of them publishes at this moment; nobody knows which.
        for relay in relays:
            await relay.stop(signal.SIGKILL)
            await relay.start()

    async def is_whole() -> bool:
        return len(await read(broker, "out")) >= len(expected)

    await until(is_whole)
    records = await read(broker, "out")
    assert [json.loads(record.value)["id"] for record in records] == expected
    sequences = [int(dict(record.headers)["etude-sequence"]) for record in records]
    assert sequences == sorted(set(sequences))


async def test_relays_reach_a_broker_over_tls_with_a_password_and_with_a_certificate(
    tmp_path: Path, service: FeedbackProcess, relays: list[Relay]
) -> None:
    tls = Certificates.make(tmp_path / "certificates")
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "wrong").write_text("other")
    trust = {"ETUDE_KAFKA_CA_FILE": str(tls.authority)}
    identity = {"ETUDE_KAFKA_IDENTITY_FILE": str(tls.both)}
    login = {"ETUDE_KAFKA_USER": USER, "ETUDE_KAFKA_PASSWORD_FILE": str(tmp_path / "password")}
    async with kafka_broker(tmp_path / "kafka", tls) as broker:
        await make_topics(broker.plain)
        relays += [
            Relay("from-kafka", service, env(broker.by_password, "in", **trust, **login)),
            Relay("to-kafka", service, env(broker.by_certificate, "out", **trust, **identity)),
        ]
        for relay in relays:
            await relay.start()
        producer = AIOKafkaProducer(bootstrap_servers=broker.plain)
        await producer.start()
        await producer.send_and_wait("in", examples.encoded(id="1"))
        await producer.stop()

        async def has_arrived() -> bool:
            return [json.loads(each.value)["id"] for each in await read(broker.plain, "out")] == [
                "1"
            ]

        await until(has_arrived)
        wrong = {"ETUDE_KAFKA_PASSWORD_FILE": str(tmp_path / "wrong")}
        for servers, access in (
            (broker.by_certificate, trust),
            (broker.by_password, identity | login),  # trusts other authorities
            (broker.by_password, trust | login | wrong),
        ):
            process = await Relay("to-kafka", service, env(servers, "out", **access)).start()
            _, told = await asyncio.wait_for(process.communicate(), DONE_S)
            assert process.returncode == 78, told
            assert b"cannot be reached" in told
            assert b"Traceback" not in told


async def test_a_topic_that_is_not_there_or_has_no_order_is_named(
    broker: str, tmp_path: Path
) -> None:
    service = FeedbackProcess.prepare(tmp_path)
    for direction, topic, servers, problem in (
        ("from-kafka", "other", broker, b"has no topic other"),
        ("to-kafka", "in", broker, b"topic in has 3 partitions"),
        ("from-kafka", "in", "127.0.0.1:1", b"cannot be reached"),
    ):
        process = await Relay(direction, service, env(servers, topic)).start()
        _, told = await asyncio.wait_for(process.communicate(), DONE_S)
        assert process.returncode == 78, told
        assert problem in told
        assert b"Traceback" not in told


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ETUDE_KAFKA_SERVERS": "kafka"}, "is no host:port"),
        ({"ETUDE_KAFKA_CA_FILE": "/no/file"}, "No such file"),
        (
            {"ETUDE_KAFKA_USER": "relay", "ETUDE_KAFKA_PASSWORD_FILE": "/no/file"},
            "ETUDE_KAFKA_PASSWORD_FILE",
        ),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        KafkaSettings.from_env(env("127.0.0.1:9092", "in") | change)


def test_events_leave_this_machine_over_tls_alone() -> None:
    assert KafkaSettings.from_env(env("localhost:9092,127.0.0.1:9092", "in")).tls is None
    assert KafkaSettings.from_env(env("localhost:9092,kafka-1:9092", "in")).tls is not None
