"""Client of a feedback service for relays: posts batches of events, and reads what is stored."""

import asyncio
import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from etude.common.errors import UnavailableError
from etude.common.feedback.http_exchange import (
    BATCH_TYPE,
    EVENTS_PATH,
    FeedbackHttp,
    HttpAnswer,
)


class EventResult(NamedTuple):
    """Answer of the service to one event."""

    status: int
    reason: str


class StoredPage(NamedTuple):
    """Events that the service has stored, in order."""

    events: Sequence[tuple[int, bytes]]
    """Sequence, and the redacted event in JSON."""
    end: int | None
    """Sequence behind which the next page begins; None at the end."""


@dataclass(frozen=True, slots=True)
class FeedbackEndpoint:
    """A feedback service to which batches are posted, and from which pages are read."""

    http: FeedbackHttp

    async def post_events(self, items: Sequence[bytes]) -> list[EventResult]:
        """Post a batch; what is answered with 200 or 202 is durable.

        Raises:
            UnavailableError: the service is away, or refuses the batch as a whole.
        """
        body = b"[" + b",".join(items) + b"]"
        answer = await self._request(lambda: self.http.post(EVENTS_PATH, BATCH_TYPE, body))
        try:
            results = [EventResult(int(r["status"]), str(r["reason"])) for r in answer["results"]]
        except (KeyError, TypeError, ValueError):
            results = []
        if len(results) != len(items):
            raise UnavailableError(f"{self.http.url}: its answer is not to these events")
        return results

    async def read_events(self, *, after: int, limit: int) -> StoredPage:
        """Read usable events of the key's tenant behind a sequence.

        Raises:
            UnavailableError: the service is away, or refuses.
        """
        path = f"{EVENTS_PATH}?after={after}&limit={limit}"
        answer = await self._request(lambda: self.http.get(path))
        try:
            events = [
                (int(each["sequence"]), json.dumps(each["event"]).encode())
                for each in answer["events"]
            ]
            end = answer["next"]
            return StoredPage(events, None if end is None else int(end))
        except (KeyError, TypeError, ValueError):
            raise UnavailableError(f"{self.http.url}: its answer is no page of events") from None

    async def _request(self, exchange: Callable[[], HttpAnswer]) -> Mapping[str, Any]:
        try:
            status, content, _ = await asyncio.to_thread(exchange)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self.http.url}: {error}") from error
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            reason = answer.get("message", "") if isinstance(answer, dict) else ""
            raise UnavailableError(f"{self.http.url} answers {status} {str(reason)[:200]}")
        return answer
