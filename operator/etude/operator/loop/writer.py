"""Tells users about their objects: a status at a bearable pace, an Event for every change."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from etude.common.api.meta import Condition
from etude.common.api.status import Status
from etude.operator.actions import Note
from etude.operator.clock import Clock
from etude.operator.cluster.api import Cluster
from etude.operator.conditions import transitions
from etude.operator.manifests import Manifest, uid

MOVING = {
    *("step", "reward", "evalSuccess", "policyVersion", "staleness", "tokensPerSecond", "ettr"),
    *("rollouts", "lastStepTime", "reported", "slots", "leases", "usage"),
    *("autoscaler", "provision"),
}
"""Figures that change all the time; everything else in a status is written at once."""

RATE_PER_S = 1.0
"""Writes of one object's status in the long run, whatever they say."""
BURST = 60.0
"""Writes that may follow each other at once: a whole life, however many turns it takes."""

REPORTER = "etude.dev/operator"


@dataclass(slots=True)
class StatusWriter:
    """Status writes and Events of all objects."""

    cluster: Cluster
    clock: Clock
    instance: str
    pace_s: float = 5.0
    """Least time between two writes of the same object that only move figures."""
    _written: "dict[str, _Written]" = field(default_factory=dict)

    async def write(self, seen: Manifest, status: Status) -> float | None:
        """Write what differs; returns after how many seconds what was held back should be written.

        Raises:
            ConflictError: the object has changed since it was seen.
        """
        known = type(status).model_validate(seen.get("status", {}))
        before, after = known.to_json(), status.to_json()
        if after == before:
            return None
        now = self.clock.monotonic_s()
        written = self._written.setdefault(uid(seen), _Written(BURST, now, float("-inf")))
        wait_s = written.wait_s(now)
        if _lasting(after) == _lasting(before):
            wait_s = max(wait_s, written.last_s + self.pace_s - now)
        if wait_s > 0:
            return wait_s
        await self.cluster.replace_status(seen, after)
        written.note(now)
        for note in _notes(known, status):
            await self.record(seen, note)
        return None

    async def record(self, about: Manifest, note: Note) -> None:
        """Publish an Event about an object."""
        await self.cluster.record(self._event(about, note))

    def forget(self, gone_uid: str) -> None:
        """The object is gone."""
        self._written.pop(gone_uid, None)

    def _event(self, about: Manifest, note: Note) -> Manifest:
        metadata = about["metadata"]
        digest = hashlib.sha256(f"{uid(about)}/{note.name}".encode()).hexdigest()[:16]
        when = datetime.fromtimestamp(self.clock.wall_s(), UTC)
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{digest}",
                "namespace": metadata.get("namespace", "default"),
            },
            "eventTime": when.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": REPORTER,
            "reportingInstance": self.instance,
            "action": "Reconcile",
            "reason": note.reason[:128],
            "note": note.message[:1024],
            "type": "Warning" if note.is_warning else "Normal",
            "regarding": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata.get("namespace", "default"),
                "uid": uid(about),
            },
        }


@dataclass(slots=True)
class _Written:
    """The writes of one status: a token bucket, and when the last one was."""

    tokens: float
    counted_s: float
    last_s: float

    def wait_s(self, now_s: float) -> float:
        """How long to hold the next write back; 0 or less for not at all."""
        earned = (now_s - self.counted_s) * RATE_PER_S
        self.tokens, self.counted_s = min(BURST, self.tokens + earned), now_s
        return (1 - self.tokens) / RATE_PER_S

    def note(self, now_s: float) -> None:
        """One was written."""
        self.tokens -= 1
        self.last_s = now_s


def _lasting(status: Mapping[str, Any]) -> dict[str, Any]:
    lasting = {key: value for key, value in status.items() if key not in MOVING}
    lasting["environments"] = [
        {key: value for key, value in item.items() if key != "leased"}
        for item in status.get("environments", ())
    ]
    return lasting


def _notes(before: Status, after: Status) -> list[Note]:
    notes = [
        Note(
            name=f"{item.condition.type}-{item.condition.status}"
            f"-{item.condition.last_transition_time}",
            reason=item.condition.reason,
            message=item.condition.message or f"{item.condition.type} is {item.condition.status}",
            is_warning=item.is_warning,
        )
        for item in transitions(_conditions(before), _conditions(after))
    ]
    hold = getattr(before, "hold", None)
    if hold is not None and getattr(after, "hold", None) is None:
        message = f"the run may go on: {hold.reason} of {hold.since} holds it no more"
        notes.append(Note(f"hold-{hold.since}", "HoldEnded", message))
    intent = getattr(after, "intent", None)
    if (
        intent is not None
        and intent.type == "Restart"
        and intent != getattr(before, "intent", None)
    ):
        who = intent.role or "every role"
        message = f"{who} starts anew as attempt {intent.attempt}: {intent.message}"
        notes.append(Note(f"restart-{intent.attempt}", intent.reason, message, is_warning=True))
    return notes


def _conditions(status: Status) -> Sequence[Condition]:
    found: Sequence[Condition] = getattr(status, "conditions", ())
    return found
