"""Client of a feedback service for relays: posts batches of events, and reads what is stored."""

import asyncio
import http.client
import json
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from etude.common.errors import UnavailableError

_REQUEST_S = 40.0
"""For one request: the service waits for its store for 30 s."""
_MAX_ANSWER_BYTES = 64 << 20
"""A page of events has 8 MiB, and one event more."""
_EVENTS = "/v1/events"
_BATCH_TYPE = "application/cloudevents-batch+json"


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
    """A feedback service over HTTP or HTTPS; no redirect is followed."""

    url: str
    """As `check_address` allows it."""
    key: str = field(repr=False)
    ca_file: Path | None = None
    """Certificates to trust instead of the system's."""

    async def post_events(self, items: Sequence[bytes]) -> list[EventResult]:
        """Post a batch; what is answered with 200 or 202 is durable.

        Raises:
            UnavailableError: the service is away, or refuses the batch as a whole.
        """
        body = b"[" + b",".join(items) + b"]"
        answer = await self._request("POST", _EVENTS, body)
        try:
            results = [EventResult(int(r["status"]), str(r["reason"])) for r in answer["results"]]
        except (KeyError, TypeError, ValueError):
            results = []
        if len(results) != len(items):
            raise UnavailableError(f"{self.url}: its answer is not to these events")
        return results

    async def read_events(self, *, after: int, limit: int) -> StoredPage:
        """Read usable events of the key's tenant behind a sequence.

        Raises:
            UnavailableError: the service is away, or refuses.
        """
        answer = await self._request("GET", f"{_EVENTS}?after={after}&limit={limit}")
        try:
            events = [
                (int(each["sequence"]), json.dumps(each["event"]).encode())
                for each in answer["events"]
            ]
            end = answer["next"]
            return StoredPage(events, None if end is None else int(end))
        except (KeyError, TypeError, ValueError):
            raise UnavailableError(f"{self.url}: its answer is no page of events") from None

    async def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> Mapping[str, Any]:
        status, content = await asyncio.to_thread(self._exchange, method, path, body)
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status != 200 or not isinstance(answer, dict):
            reason = answer.get("message", "") if isinstance(answer, dict) else ""
            raise UnavailableError(f"{self.url} answers {status} {str(reason)[:200]}")
        return answer

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        parts = urllib.parse.urlsplit(self.url)
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_file)
            connection = http.client.HTTPSConnection(
                parts.netloc, timeout=_REQUEST_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=_REQUEST_S)
        headers = {"content-type": _BATCH_TYPE, "authorization": f"Bearer {self.key}"}
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self.url}: {error}") from error
        finally:
            connection.close()
