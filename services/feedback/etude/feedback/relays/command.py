"""`etude-feedback relay`: hand events from a queue to a service, or from a service to a log."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from etude.common import process
from etude.common.feedback.http_exchange import FeedbackHttp
from etude.common.settings_fields import parse_count, parse_path
from etude.feedback.relays.endpoint import FeedbackEndpoint
from etude.feedback.relays.event_places import EventPlace
from etude.feedback.relays.incoming import relay_events
from etude.feedback.relays.outgoing import publish_events

_MAX_SEQUENCE = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """Environment variables, read once."""

    endpoint: FeedbackEndpoint = field(repr=False)
    after: int | None
    """Sequence behind which a log without an event begins."""

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises:
            KeyError: names a variable that is not set.
            ValueError: names a variable that is invalid.
        """
        url = env["ETUDE_RELAY_URL"]
        try:
            key = Path(env["ETUDE_RELAY_KEY_FILE"]).read_text("ascii").strip()
        except OSError as error:
            raise ValueError(f"ETUDE_RELAY_KEY_FILE: {error}") from error
        try:
            http = FeedbackHttp(url, key, parse_path(env, "ETUDE_RELAY_CA_FILE"))
        except ValueError as error:
            raise ValueError(f"ETUDE_RELAY_URL: {error}") from None
        after = None
        if env.get("ETUDE_RELAY_AFTER"):
            after = parse_count(env, "ETUDE_RELAY_AFTER", 0, high=_MAX_SEQUENCE)
        return cls(endpoint=FeedbackEndpoint(http), after=after)


async def run_relay(settings: RelaySettings, place: EventPlace, *, is_incoming: bool) -> None:
    """Hand events on until SIGTERM, from a place or to it.

    Raises:
        UserError: the place is not there, or a log lost its newest event.
    """
    stop = asyncio.Event()
    with process.shutdown_signals(stop):
        if is_incoming:
            queue = await place.open_queue()
            await relay_events(queue, settings.endpoint, stop)
            await queue.close()
        else:
            log = await place.open_log()
            await publish_events(log, settings.endpoint, stop, start=settings.after)
            await log.close()
