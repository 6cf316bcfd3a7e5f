"""Sender of simulated users' events: CloudEvents over HTTP, sent again until they are stored."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx2

from etude.common.feedback.events import event_type

SOURCE = "etude-simulated-users"
BATCH_TYPE = "application/cloudevents-batch+json"
PATIENCE_S = 60.0
"""Events are sent again for so long; a service that is away longer fails the simulation."""
PAUSE_S = 0.5
_AGAIN = frozenset({429, 503})


@dataclass(slots=True)
class EventSender:
    """Sends events of users, and counts the answers."""

    http: httpx2.AsyncClient
    url: str
    tenant: str
    terms: str
    """Version of the terms that the users agreed to."""
    answers: "Counter[str]" = field(default_factory=Counter)
    """Events by the reason of their last answer."""
    num_repeated: int = 0
    """Events that were sent more than once."""

    def make_event(
        self, user: str, rollout: str, number: int, kind: str, payload: Mapping[str, object]
    ) -> dict[str, Any]:
        """Make an event; its id is a function of the rollout, so that it counts once."""
        now = datetime.now(UTC).isoformat()
        return {
            "specversion": "1.0",
            "id": f"{rollout}-{number}",
            "source": SOURCE,
            "type": event_type(kind),
            "subject": rollout,
            "time": now,
            "data": {
                "tenant": self.tenant,
                "user": user,
                "rollout": rollout,
                "consent": {
                    "granted": True,
                    "policyVersion": self.terms,
                    "at": "2026-11-01T00:00:00Z",
                },
                "payload": payload,
            },
        }

    async def send(self, key: str, events: Sequence[Mapping[str, Any]]) -> None:
        """Send events of one user until each has a final answer.

        Raises:
            TimeoutError: the service does not take them.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._send_all(key, {event["id"]: event for event in events})
        except TimeoutError:
            what = f"{self.url} took no events for {PATIENCE_S:.0f} s"
            raise TimeoutError(what) from None

    async def _send_all(self, key: str, waiting: dict[str, Mapping[str, Any]]) -> None:
        while waiting:
            for answer in await self._post(key, [*waiting.values()]):
                event = waiting.get(answer["id"])
                if event is not None and answer["status"] not in _AGAIN:
                    del waiting[answer["id"]]
                    self.answers[answer["reason"]] += 1
            if waiting:
                self.num_repeated += len(waiting)
                await asyncio.sleep(PAUSE_S)

    async def _post(self, key: str, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Post a batch; no answers if the service is away."""
        headers = {"authorization": f"Bearer {key}", "content-type": BATCH_TYPE}
        try:
            answer = await self.http.post(f"{self.url}/v1/events", json=events, headers=headers)
        except httpx2.TransportError:
            return []
        if answer.status_code in _AGAIN:
            return []
        answer.raise_for_status()
        results: list[dict[str, Any]] = answer.json()["results"]
        return results
