"""Events to a log: each usable event once, in the order of the ledger.

The log itself says what it has: the newest record carries its sequence in the ledger. A relay that
was killed goes on behind it, and one that is not alone is refused by the log.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from etude.common.backoff import Backoff
from etude.common.errors import Problem, UnavailableError, UserError
from etude.feedback.relays.endpoint import FeedbackEndpoint
from etude.feedback.relays.incoming import FIRST_WAIT_S, LONGEST_WAIT_S, wait_for_stop

log = logging.getLogger(__name__)

PAGE_EVENTS = 500
POLL_S = 1.0


class LogPosition(NamedTuple):
    """Newest event of a log, as the log itself has it."""

    sequence: int | None
    """Of the newest event in it; None if it has none."""
    is_new: bool
    """It has never had one."""


class EventLog(Protocol):
    """A log that one relay appends to.

    Raises:
        UnavailableError: by each method, if the log is away, or has other records than expected.
    """

    async def read_position(self) -> LogPosition | None:
        """Read its newest event; None while the log is another relay's.

        Raises:
            UserError: there is no such log.
        """
        ...

    async def append(self, events: Sequence[tuple[int, bytes]]) -> None:
        """Append events behind the position that was read, durably."""
        ...

    async def close(self) -> None:
        """Leave the log."""
        ...


async def publish_events(
    target: EventLog, endpoint: FeedbackEndpoint, stop: asyncio.Event, *, start: int | None
) -> None:
    """Append events to a log until told to stop.

    Args:
        target: the log.
        endpoint: of the service.
        stop: ends it.
        start: sequence behind which a log without an event begins; None: a new one with the first
            event, and another one not at all.

    Raises:
        UserError: there is no such log, or it lost its newest event.
    """
    backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
    position: int | None = None
    while not stop.is_set():
        try:
            if position is None:
                newest = await target.read_position()
                if newest is None:
                    backoff.reset()
                    await wait_for_stop(stop, POLL_S)
                    continue
                position = _find_start(newest, start)
            page = await endpoint.read_events(after=position, limit=PAGE_EVENTS)
            if page.events:
                await target.append(page.events)
            backoff.reset()
        except UnavailableError as error:
            log.warning("events are not published: %s", error)
            position = None  # an append may have taken effect
            await wait_for_stop(stop, backoff.next_s())
            continue
        if page.end is None:
            await wait_for_stop(stop, POLL_S)
        else:
            position = page.end


def _find_start(position: LogPosition, start: int | None) -> int:
    if position.sequence is not None:
        return position.sequence
    if start is None and not position.is_new:
        fix = (
            "set ETUDE_RELAY_AFTER to the sequence of the last event that was published (0: again)"
        )
        what = "has lost its newest event, which says where to go on"
        raise UserError(Problem("LostPosition", what, "the log of events", fix))
    return start or 0
