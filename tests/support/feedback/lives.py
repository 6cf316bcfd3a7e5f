"""Lives of a feedback service in one process: a ledger, its intake, and its writer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3
from tests.support.feedback import events as examples
from tests.support.feedback.events import TERMS

from etude.common.api_keys import KeyOwner, KeyScope
from etude.common.blobs import MemoryStore
from etude.feedback.ingest.intake import EventIntake
from etude.feedback.ledger.ledger import FeedbackLedger, StoredEvent, open_ledger
from etude.feedback.ledger.user_keys import LedgerSecret

SECRET = LedgerSecret(bytes(range(32)))
NOW_MS = 1_793_600_000_000
"""A time in November 2026, after the decisions of the examples."""
SERVER = KeyOwner("backend", "acme", frozenset({KeyScope.USERS}), TERMS, 1_000_000)


@dataclass
class Stores:
    """What outlives a process."""

    ledger: MemoryStore = field(default_factory=MemoryStore)
    keys: MemoryStore = field(default_factory=MemoryStore)

    def contents(self) -> bytes:
        """All that is stored, to look for what must not be there."""
        return b"\0".join([*self.ledger.objects.values(), *self.keys.objects.values()])


@contextlib.asynccontextmanager
async def living(stores: Stores, *, now_ms: int = NOW_MS) -> AsyncIterator[EventIntake]:
    """One life of the service, from its start to its end."""
    ledger = open_ledger(stores.ledger, stores.keys, SECRET, uid="test", holder="test")
    ledger.log.gather_s = 0.0
    writer = asyncio.create_task(ledger.log.run(), name="ledger")
    try:
        opened = asyncio.create_task(ledger.wait_durable(ledger.log.last_sequence))
        await asyncio.wait({writer, opened}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if writer.done():
            writer.result()  # it died while it opened the epoch
        yield EventIntake(ledger, clock_ms=lambda: now_ms)
    finally:
        writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writer


async def send(intake: EventIntake, kind: str, user: str, **fields: Any) -> int:
    """Send one event, with an id that its content gives; returns its status."""
    name = blake3(f"{kind}-{user}-{fields}".encode()).hexdigest()[:8]
    (answer,) = await intake.take([examples.encoded(kind, id=name, user=user, **fields)], SERVER)
    return answer.status


def read_all(
    ledger: FeedbackLedger, tenant: str = "acme", *, after: int = 0, limit: int = 1_000
) -> list[StoredEvent]:
    """All usable events behind a sequence, read page by page."""
    events: list[StoredEvent] = []
    while (page := ledger.read_page(tenant=tenant, after=after, limit=limit)).end > after:
        events += page.events
        after = page.end
    return events


def ids(ledger: FeedbackLedger, tenant: str = "acme") -> list[str]:
    """The id of each usable event."""
    return [json.loads(event.text)["id"] for event in read_all(ledger, tenant)]
