"""`etude-feedback relay`: hand events from a queue to a service, or from a service to a log."""

import asyncio
import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from etude.common import process
from etude.common.feedback.client import check_address
from etude.common.settings_fields import parse_count, parse_path
from etude.feedback.relays.endpoint import FeedbackEndpoint
from etude.feedback.relays.incoming import relay_events
from etude.feedback.relays.nats_streams import NatsLog, NatsQueue, NatsSettings
from etude.feedback.relays.outgoing import publish_events

_MAX_SEQUENCE = 1 << 62
_LOCAL = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Environment variables, read once."""

    direction: str
    endpoint: FeedbackEndpoint = field(repr=False)
    after: int | None
    """Sequence behind which a log without an event begins."""
    nats: NatsSettings

    @classmethod
    def from_env(cls, direction: str, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        url = env["ETUDE_RELAY_URL"]
        try:
            check_address(url)
        except ValueError as error:
            raise ValueError(f"ETUDE_RELAY_URL: {error}") from None
        try:
            key = Path(env["ETUDE_RELAY_KEY_FILE"]).read_text("ascii").strip()
        except OSError as error:
            raise ValueError(f"ETUDE_RELAY_KEY_FILE: {error}") from error
        after = None
        if env.get("ETUDE_RELAY_AFTER"):
            after = parse_count(env, "ETUDE_RELAY_AFTER", 0, high=_MAX_SEQUENCE)
        return cls(
            direction=direction,
            endpoint=FeedbackEndpoint(url, key, parse_path(env, "ETUDE_RELAY_CA_FILE")),
            after=after,
            nats=_read_nats(env),
        )


def _read_nats(env: Mapping[str, str]) -> NatsSettings:
    url = env["ETUDE_NATS_URL"]
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in {"nats", "tls"} or not parts.hostname:
        raise ValueError("ETUDE_NATS_URL: is no nats://host:port or tls://host:port")
    if parts.scheme == "nats" and parts.hostname not in _LOCAL:
        raise ValueError("ETUDE_NATS_URL: would send what users do in the clear: use tls://")
    return NatsSettings(
        url=url,
        stream=env["ETUDE_NATS_STREAM"],
        subject=env["ETUDE_NATS_SUBJECT"],
        consumer=env.get("ETUDE_NATS_CONSUMER", "etude-feedback"),
        credentials_file=parse_path(env, "ETUDE_NATS_CREDENTIALS"),
        ca_file=parse_path(env, "ETUDE_NATS_CA_FILE"),
    )


async def run_relay(settings: RelaySettings) -> None:
    """Hand events on until SIGTERM.

    Raises:
        UserError: queue or log are not there.
    """
    stop = asyncio.Event()
    with process.shutdown_signals(stop):
        if settings.direction == "from-nats":
            queue = await NatsQueue.open(settings.nats)
            await relay_events(queue, settings.endpoint, stop)
            await queue.close()
        else:
            log = await NatsLog.open(settings.nats)
            await publish_events(log, settings.endpoint, stop, start=settings.after)
            await log.close()
