"""Kafka as a queue and as a log of events."""

import asyncio
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError

from etude.common.errors import Problem, UnavailableError, UserError
from etude.common.settings_fields import parse_path
from etude.feedback.relays.event_places import is_local
from etude.feedback.relays.incoming import QueuedEvent
from etude.feedback.relays.outgoing import LogPosition

_FETCH_MS = 2_000
_START_S = 30.0
_IDLE_MS = (1 << 31) - 1
_SEQUENCE = "etude-sequence"
_CONTENT_TYPE = ("content-type", b"application/cloudevents+json; charset=utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """Place of a topic, and how to get there."""

    servers: str
    """host:port, or several with commas between them."""
    topic: str
    group: str
    """Name under which relays share the topic."""
    tls: ssl.SSLContext | None
    """None on this machine alone."""
    user: str = ""
    """For SASL/SCRAM; empty without it."""
    password: str = field(default="", repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        servers = env["ETUDE_KAFKA_SERVERS"]
        hosts = [server.rpartition(":")[0] for server in servers.split(",")]
        if not all(hosts):
            raise ValueError("ETUDE_KAFKA_SERVERS: is no host:port, or several of them")
        ca_file = parse_path(env, "ETUDE_KAFKA_CA_FILE")
        identity = parse_path(env, "ETUDE_KAFKA_IDENTITY_FILE")
        tls = None
        if ca_file or identity or not all(map(is_local, hosts)):
            try:
                tls = ssl.create_default_context(cafile=ca_file)
                if identity:
                    tls.load_cert_chain(identity)
            except OSError as error:  # also of SSL
                raise ValueError(f"ETUDE_KAFKA_…_FILE: {error}") from error
        user, password = env.get("ETUDE_KAFKA_USER", ""), ""
        if user:
            try:
                password = Path(env["ETUDE_KAFKA_PASSWORD_FILE"]).read_text("utf-8").strip()
            except (OSError, ValueError) as error:
                raise ValueError(f"ETUDE_KAFKA_PASSWORD_FILE: {error}") from error
        return cls(
            servers=servers,
            topic=env["ETUDE_KAFKA_TOPIC"],
            group=env.get("ETUDE_KAFKA_GROUP", "etude-feedback"),
            tls=tls,
            user=user,
            password=password,
        )

    def access(self) -> dict[str, Any]:
        """Arguments of every client."""
        protocol = "SSL" if self.tls else "PLAINTEXT"
        return {
            "bootstrap_servers": self.servers,
            "security_protocol": f"SASL_{protocol}" if self.user else protocol,
            "ssl_context": self.tls,
            "sasl_mechanism": "SCRAM-SHA-512",
            "sasl_plain_username": self.user or None,
            "sasl_plain_password": self.password or None,
        }

    @property
    def producer_id(self) -> str:
        """Name that all producers of the topic share: the newest one ends the others."""
        return f"{self.group}-{self.topic}"

    async def start_consumer(self, group: str) -> AIOKafkaConsumer:
        """Start a consumer of a group that reads what is committed.

        Raises:
            UserError: no server answers, or there is no such topic.
        """
        consumer = AIOKafkaConsumer(
            **self.access(),
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            # A relay that comes takes nothing from the others that it need not have.
            partition_assignment_strategy=(StickyPartitionAssignor,),
            # A log is not read from; heartbeats say whether the relay is alive.
            max_poll_interval_ms=_IDLE_MS,
        )
        try:
            await consumer.start()
            known = await consumer.topics()
        except (KafkaError, OSError) as error:
            await consumer.stop()
            raise UserError(self.problem(f"cannot be reached: {error}")) from error
        if self.topic not in known:
            await consumer.stop()
            raise UserError(self.problem(f"has no topic {self.topic}"))
        return consumer

    async def open_queue(self) -> "KafkaQueue":
        """Join the group.

        Raises:
            UserError: no server answers, or there is no such topic.
        """
        consumer = await self.start_consumer(self.group)
        consumer.subscribe([self.topic])
        return KafkaQueue(consumer)

    async def open_log(self) -> "KafkaLog":
        """Join the group of relays that publish to the topic: one does, the others stand by.

        Raises:
            UserError: no server answers, or there is no such topic.
        """
        consumer = await self.start_consumer(self.producer_id)
        consumer.subscribe([self.topic])
        return KafkaLog(self, consumer)

    async def start_producer(self) -> AIOKafkaProducer:
        """Start a producer: transactions of every other one of this topic fail from now on.

        Raises:
            KafkaError: the server refuses.
            TimeoutError: no server answers.
        """
        producer = AIOKafkaProducer(**self.access(), transactional_id=self.producer_id, acks="all")
        try:
            # The client itself would ask for ever.
            async with asyncio.timeout(_START_S):
                await producer.start()
        except (KafkaError, TimeoutError):
            await producer.stop()
            raise
        return producer

    def problem(self, what: str) -> Problem:
        """A problem with the topic, which is for people to make."""
        fix = "check ETUDE_KAFKA_SERVERS, and make the topic; one to publish to has one partition"
        return Problem("Unreachable", what, self.servers, fix)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError, KafkaError) as error:
        raise UnavailableError(f"Kafka: {str(error) or type(error).__name__}") from error


@dataclass(slots=True)
class KafkaQueue:
    """Records of a topic; relays of one group share its partitions."""

    consumer: AIOKafkaConsumer
    _fetched: Mapping[TopicPartition, Sequence[ConsumerRecord[Any, Any]]] = field(
        default_factory=dict, init=False
    )
    """Records about which nothing was decided yet."""

    async def fetch(self, limit: int) -> Sequence[QueuedEvent]:
        with _translated():
            await self._settle(frozenset())  # of an attempt that failed
            self._fetched = await self.consumer.getmany(timeout_ms=_FETCH_MS, max_records=limit)
        return [
            QueuedEvent(record.value or b"", (partition, record.offset))
            for partition, records in self._fetched.items()
            for record in records
        ]

    async def keep(self, events: Sequence[QueuedEvent]) -> None:
        """Nothing is to be done: the client tells the broker that it lives."""

    async def acknowledge(self, events: Sequence[QueuedEvent]) -> None:
        with _translated():
            await self._settle(frozenset(event.handle for event in events))

    async def _settle(self, settled: frozenset[tuple[TopicPartition, int]]) -> None:
        """Commit what is settled before the first record that is not, and go back to that."""
        ends: dict[TopicPartition, int] = {}
        for partition, records in self._fetched.items():
            if partition not in self.consumer.assignment():
                continue  # another relay of the group has it now, from the committed offset
            offsets = [record.offset for record in records]
            left = [offset for offset in offsets if (partition, offset) not in settled]
            end = left[0] if left else offsets[-1] + 1
            if left:
                self.consumer.seek(partition, end)
            if end > offsets[0]:
                ends[partition] = end
        if ends:
            await self.consumer.commit(ends)
        self._fetched = {}

    async def close(self) -> None:
        await self.consumer.stop()


@dataclass(slots=True)
class KafkaLog:
    """Records of a topic of one partition, each page of events one transaction.

    The group gives the partition to one of its relays; to another one, when that leaves or is not
    heard of for ten seconds. A relay that does not know yet that it lost the partition is fenced.
    """

    settings: KafkaSettings
    consumer: AIOKafkaConsumer
    producer: AIOKafkaProducer | None = None
    """None until this relay has the partition."""

    @property
    def partition(self) -> TopicPartition:
        return TopicPartition(self.settings.topic, 0)

    async def read_position(self) -> LogPosition | None:
        with _translated():
            # Raises what the group met meanwhile; records are not wanted.
            await self.consumer.getmany()
            given = self.consumer.assignment()
            if not given:
                return None
            self.consumer.pause(*given)
            num_partitions = len(self.consumer.partitions_for_topic(self.settings.topic) or ())
            if num_partitions != 1:
                what = f"topic {self.settings.topic} has {num_partitions} partitions"
                raise UserError(self.settings.problem(what))
            # In this order: transactions of other producers are over then.
            await self._stop_producer()
            self.producer = await self.settings.start_producer()
            sequence = await self.consumer.committed(self.partition)
            end = (await self.consumer.end_offsets([self.partition]))[self.partition]
        return LogPosition(sequence, is_new=end == 0)

    async def append(self, events: Sequence[tuple[int, bytes]]) -> None:
        if self.producer is None:
            raise UnavailableError("Kafka: the topic is another relay's")
        with _translated():
            async with self.producer.transaction():
                for sequence, event in events:
                    await self.producer.send(
                        self.partition.topic,
                        event,
                        partition=self.partition.partition,
                        headers=[_CONTENT_TYPE, (_SEQUENCE, b"%d" % sequence)],
                    )
                # The group's offset is a place in the ledger, committed with the events or not.
                place = {self.partition: events[-1][0]}
                await self.producer.send_offsets_to_transaction(place, self.settings.producer_id)

    async def _stop_producer(self) -> None:
        if self.producer is not None:
            await self.producer.stop()
            self.producer = None

    async def close(self) -> None:
        await self._stop_producer()
        await self.consumer.stop()
