"""NATS JetStream as a queue and as a log of events."""

import asyncio
import logging
import os
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, Header
from typing_extensions import override

from etude.common.errors import Problem, UnavailableError, UserError
from etude.common.settings_fields import parse_path
from etude.feedback.relays.event_places import is_local
from etude.feedback.relays.incoming import QueuedEvent
from etude.feedback.relays.outgoing import LogPosition

log = logging.getLogger(__name__)

ACK_WAIT_S = 60.0
"""Time after which a message of a relay that was killed is delivered again."""
_FETCH_S = 2.0
_CONNECT_S = 5
_SEQUENCE = "Etude-Sequence"
_CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsSettings:
    """Place of a stream, and how to get there."""

    url: str
    """nats://host:port, or tls://host:port."""
    stream: str
    subject: str
    consumer: str
    """Durable name under which relays share the stream."""
    credentials_file: Path | None
    ca_file: Path | None

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        url = env["ETUDE_NATS_URL"]
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in {"nats", "tls"} or not parts.hostname:
            raise ValueError("ETUDE_NATS_URL: is no nats://host:port or tls://host:port")
        if parts.scheme == "nats" and not is_local(parts.hostname):
            raise ValueError("ETUDE_NATS_URL: would send what users do in the clear: use tls://")
        return cls(
            url=url,
            stream=env["ETUDE_NATS_STREAM"],
            subject=env["ETUDE_NATS_SUBJECT"],
            consumer=env.get("ETUDE_NATS_CONSUMER", "etude-feedback"),
            credentials_file=parse_path(env, "ETUDE_NATS_CREDENTIALS"),
            ca_file=parse_path(env, "ETUDE_NATS_CA_FILE"),
        )

    async def connect(self) -> Client:
        """Connect; a connection that is lost later is made again.

        Raises:
            UserError: the server does not answer, or does not let the relay in.
        """
        is_secure = urllib.parse.urlsplit(self.url).scheme == "tls" or self.ca_file is not None
        client = _TlsClient() if is_secure else Client()
        try:
            tls = ssl.create_default_context(cafile=self.ca_file) if is_secure else None
            # The number of attempts is for later too: there it has no limit.
            async with asyncio.timeout(_CONNECT_S):
                await client.connect(
                    self.url,
                    name="etude-feedback-relay",
                    tls=tls,
                    user_credentials=str(self.credentials_file) if self.credentials_file else None,
                    max_reconnect_attempts=-1,
                    error_cb=_note_error,
                )
        except (OSError, TimeoutError, nats.errors.Error) as error:
            what = f"cannot be reached: {client.last_error or error}"
            raise UserError(self._problem(what)) from error
        return client

    async def open_queue(self) -> "NatsQueue":
        """Open the consumer, and make it if there is none.

        Raises:
            UserError: there is no server, or no such stream.
        """
        connection = await self.connect()
        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=ACK_WAIT_S, max_deliver=-1)
        try:
            messages = await connection.jetstream().pull_subscribe(
                self.subject, self.consumer, self.stream, config
            )
        except nats.js.errors.NotFoundError as error:
            raise self.missing_stream() from error
        return NatsQueue(connection, messages)

    async def open_log(self) -> "NatsLog":
        """Connect to the server.

        Raises:
            UserError: there is none.
        """
        return NatsLog(await self.connect(), self)

    def missing_stream(self) -> UserError:
        """Error for a stream that is not there: its limits are for people to decide."""
        return UserError(self._problem(f"has no stream {self.stream}"))

    def _problem(self, what: str) -> Problem:
        fix = f"check ETUDE_NATS_URL, and make it: nats stream add {self.stream}"
        return Problem("Unreachable", what, self.url, fix)


class _TlsClient(Client):
    """A client that sends nothing without TLS: its base speaks it only where the server asks.

    What stands between the two could say that the server does not, and read the events.
    """

    @override
    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if not info.get("tls_required"):
            raise nats.errors.Error("the server does not ask for TLS")
        await super()._process_info(info, initial_connection)


async def _note_error(error: Exception) -> None:
    log.warning("NATS: %s", str(error) or type(error).__name__)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (OSError, TimeoutError, nats.errors.Error) as error:
        raise UnavailableError(f"NATS: {str(error) or type(error).__name__}") from error


@dataclass(slots=True)
class NatsQueue:
    """Messages of a stream through a durable consumer, which several relays may share."""

    connection: Client
    messages: JetStreamContext.PullSubscription

    async def fetch(self, limit: int) -> Sequence[QueuedEvent]:
        try:
            with _translated():
                found = await self.messages.fetch(limit, timeout=_FETCH_S)
        except UnavailableError as error:
            if isinstance(error.__cause__, nats.errors.TimeoutError):
                return []
            raise
        return [QueuedEvent(message.data, message) for message in found]

    async def keep(self, events: Sequence[QueuedEvent]) -> None:
        with _translated():
            for event in events:
                await event.handle.in_progress()

    async def acknowledge(self, events: Sequence[QueuedEvent]) -> None:
        with _translated():
            for event in events:
                await event.handle.ack()
            await self.connection.flush()

    async def close(self) -> None:
        # A server that is away cannot be told; what is not acknowledged comes again.
        with suppress(OSError, nats.errors.Error):
            await self.connection.close()


@dataclass(slots=True)
class NatsLog:
    """Messages of one subject of a stream."""

    connection: Client
    settings: NatsSettings
    _last: int = field(default=0, init=False)
    """Number of the subject's newest message in the stream; the next one must follow it."""

    async def read_position(self) -> LogPosition:
        stream, context = self.settings.stream, self.connection.jetstream()
        with _translated():
            try:
                newest = await context.get_last_msg(stream, self.settings.subject)
            except nats.js.errors.NotFoundError:
                newest = None
            try:
                is_new = not (await context.stream_info(stream)).state.last_seq
            except nats.js.errors.NotFoundError:
                raise self.settings.missing_stream() from None
        self._last = (newest.seq or 0) if newest else 0
        text = ((newest.headers or {}) if newest else {}).get(_SEQUENCE, "")
        is_ours = text.isascii() and text.isdecimal()
        return LogPosition(int(text) if is_ours else None, is_new)

    async def append(self, events: Sequence[tuple[int, bytes]]) -> None:
        context = self.connection.jetstream()
        for sequence, event in events:
            headers = {
                "Content-Type": _CONTENT_TYPE,
                _SEQUENCE: str(sequence),
                # Refused if the subject has another newest message: there is another relay.
                Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(self._last),
            }
            with _translated():
                stored = await context.publish(
                    self.settings.subject, event, stream=self.settings.stream, headers=headers
                )
            self._last = stored.seq

    async def close(self) -> None:
        # A server that is away cannot be told; what is not acknowledged comes again.
        with suppress(OSError, nats.errors.Error):
            await self.connection.close()
