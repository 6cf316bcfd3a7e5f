"""Events from a queue: acknowledged there once they are durable in the feedback service.

Killed in between, a relay gets them again, and the service knows them by their ids: none is lost,
and none counts twice.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import pydantic_core

from etude.common.backoff import Backoff
from etude.common.errors import UnavailableError
from etude.common.feedback.events import MAX_EVENT_BYTES
from etude.feedback.relays.endpoint import FeedbackEndpoint

log = logging.getLogger(__name__)

BATCH_EVENTS = 100
BATCH_BYTES = 3 << 20
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
_STORED = frozenset({200, 202})


class QueuedEvent(NamedTuple):
    """A message of a queue; it should be one CloudEvent in JSON."""

    data: bytes
    handle: Any
    """By which the queue knows it."""


class EventQueue(Protocol):
    """A queue that delivers again what is not acknowledged.

    Raises:
        UnavailableError: by each method, if the queue is away.
    """

    async def fetch(self, limit: int) -> Sequence[QueuedEvent]:
        """Wait some seconds for events; there may be none."""
        ...

    async def keep(self, events: Sequence[QueuedEvent]) -> None:
        """Ask for more time."""
        ...

    async def acknowledge(self, events: Sequence[QueuedEvent]) -> None:
        """Tell the queue to forget them; what it delivered besides comes again."""
        ...

    async def close(self) -> None:
        """Leave the queue."""
        ...


async def relay_events(queue: EventQueue, endpoint: FeedbackEndpoint, stop: asyncio.Event) -> None:
    """Hand events to a service until told to stop."""
    backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
    while not stop.is_set():
        try:
            events = await queue.fetch(BATCH_EVENTS)
            await queue.acknowledge(await _deliver(events, queue, endpoint, stop))
            backoff.reset()
        except UnavailableError as error:
            log.warning("events wait: %s", error)
            await wait_for_stop(stop, backoff.next_s())


async def wait_for_stop(stop: asyncio.Event, wait_s: float) -> None:
    """Wait, but no longer than until told to stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await stop.wait()


async def _deliver(
    events: Sequence[QueuedEvent],
    queue: EventQueue,
    endpoint: FeedbackEndpoint,
    stop: asyncio.Event,
) -> list[QueuedEvent]:
    """Post events, and return those that are stored or refused for good; the others come again."""
    refused: Counter[str] = Counter()
    settled: list[QueuedEvent] = []
    waiting: list[QueuedEvent] = []
    for event in events:
        problem = find_problem(event.data)
        (settled if problem else waiting).append(event)
        refused.update([problem] if problem else [])
    backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
    while waiting and not stop.is_set():
        part = _first_part(waiting)
        try:
            results = await endpoint.post_events([event.data for event in part])
        except UnavailableError as error:
            log.warning("events wait: %s", error)
            await queue.keep(waiting)
            await wait_for_stop(stop, backoff.next_s())
            continue
        for event, result in zip(part, results, strict=True):
            if result.status not in _STORED:
                refused[result.reason] += 1
            # The service could not decide about one with 5xx: it stays in the queue.
            if result.status < 500:
                settled.append(event)
        waiting = waiting[len(part) :]
    for reason, number in refused.items():
        log.warning("%d events are not stored: %s", number, reason)
    return settled


def find_problem(data: bytes) -> str:
    """Reason why a message cannot stand in a batch, or empty: it is one JSON object."""
    if len(data) > MAX_EVENT_BYTES:
        return "TooLarge"
    # As the service reads it: a list is one level deeper, and two values are no event.
    try:
        values = pydantic_core.from_json(b"[" + data + b"]", allow_inf_nan=False)
    except ValueError:
        values = []
    return "" if len(values) == 1 and isinstance(values[0], dict) else "InvalidEvent"


def _first_part(waiting: Sequence[QueuedEvent]) -> Sequence[QueuedEvent]:
    """As many events as one request may have; at least one."""
    size = number = 0
    for event in waiting:
        size += len(event.data) + 1
        if number and size > BATCH_BYTES:
            break
        number += 1
    return waiting[:number]
