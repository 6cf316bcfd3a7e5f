"""Status writer and event recorder, both with rate limits per object."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from etude.common.api.meta import Condition
from etude.common.api.run.status import StatusModel
from etude.operator import metrics
from etude.operator.actions import Note
from etude.operator.clock import Clock
from etude.operator.conditions import transitions
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, uid
from etude.operator.token_bucket import Bucket

MOVING = {
    *("step", "reward", "evalSuccess", "policyVersion", "staleness", "tokensPerSecond", "ettr"),
    *("rollouts", "lastStepTime", "reported", "slots", "leases", "usage"),
    *("autoscaler", "provision"),
}
"""Fields that change all the time; a change of any other field is written immediately."""

STATUSES_PER_S = 1.0
"""Sustained status writes of one object."""
STATUS_BURST = 60.0
"""Status writes of one object in a burst: enough for a whole life of a run."""
EVENTS_PER_S = 0.1
EVENT_BURST = 100.0
"""Events of one object in a burst; kubelets have 25. A flapping condition is in its status."""

MOST_NAME, MOST_REASON, MOST_NOTE = 230, 128, 1024
"""Limits of the API server, in bytes."""

REPORTER = "etude.dev/operator"


class Pace(NamedTuple):
    """Debounce times of status writes, in seconds."""

    figures_s: float = 5.0
    """Least time between two writes of one object that only change figures."""
    passing_s: float = 0.0
    """Time for which a transient status must have differed from the written one, to be written."""


@dataclass(slots=True)
class StatusWriter:
    """Writes statuses and records Events of all objects."""

    cluster: Cluster
    clock: Clock
    instance: str
    pace: Pace = field(default_factory=Pace)
    _told: "dict[str, _Told]" = field(default_factory=dict)
    """By uid."""

    async def write(
        self, seen: Manifest, status: StatusModel, *, is_passing: bool = False
    ) -> float | None:
        """Write a status that differs; returns the delay in seconds of a write that was held back.

        Args:
            seen: the object as it was observed.
            status: its new status.
            is_passing: whether the status is transient, and may be superseded before it is written.

        Raises:
            ConflictError: the object has changed since it was observed.
        """
        known = type(status).parse_known_fields(seen.get("status", {}))
        before, after = known.to_json(), status.to_json()
        told = self._about(seen)
        if after == before:
            told.differs_s = None
            return None
        now = self.clock.monotonic_s()
        wait_s = told.statuses.wait_s(now)
        if is_passing:
            told.differs_s = now if told.differs_s is None else told.differs_s
            wait_s = max(wait_s, told.differs_s + self.pace.passing_s - now)
        if _lasting(after) == _lasting(before):
            wait_s = max(wait_s, told.written_s + self.pace.figures_s - now)
        if wait_s > 0:
            return wait_s
        await self.cluster.replace_status(seen, after)
        told.statuses.take()
        told.written_s, told.differs_s = now, None
        for note in _notes(known, status):
            await self.record(seen, note)
        return None

    async def record(self, about: Manifest, note: Note) -> None:
        """Publish an Event about an object, unless its token bucket is empty.

        An Event repeats what the status or the controller's log contains.
        """
        events = self._about(about).events
        if events.wait_s(self.clock.monotonic_s()) > 0:
            metrics.EVENTS_DROPPED.inc()
            return
        events.take()
        await self.cluster.record(self._event(about, note))

    def forget(self, gone_uid: str) -> None:
        """Drop the state of a deleted object."""
        self._told.pop(gone_uid, None)

    def _about(self, seen: Manifest) -> "_Told":
        now = self.clock.monotonic_s()
        return self._told.setdefault(
            uid(seen),
            _Told(
                statuses=Bucket(rate_per_s=STATUSES_PER_S, burst=STATUS_BURST, counted_s=now),
                events=Bucket(rate_per_s=EVENTS_PER_S, burst=EVENT_BURST, counted_s=now),
            ),
        )

    def _event(self, about: Manifest, note: Note) -> Manifest:
        metadata = about["metadata"]
        digest = hashlib.sha256(f"{uid(about)}/{note.name}".encode()).hexdigest()[:16]
        when = datetime.fromtimestamp(self.clock.wall_s(), UTC)
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{_cut(metadata['name'], MOST_NAME).rstrip('-.')}.{digest}",
                "namespace": metadata.get("namespace", "default"),
            },
            "eventTime": when.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": REPORTER,
            "reportingInstance": self.instance,
            "action": "Reconcile",
            "reason": _cut(note.reason, MOST_REASON),
            "note": _cut(note.message, MOST_NOTE),
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
class _Told:
    """Rate limits of one object."""

    statuses: Bucket
    events: Bucket
    written_s: float = float("-inf")
    """Time of the last status write."""
    differs_s: float | None = None
    """Since when the written status differs, if only by a transient one."""


def _cut(text: str, limit: int) -> str:
    return text.encode()[:limit].decode(errors="ignore")


def _lasting(status: Mapping[str, Any]) -> dict[str, Any]:
    lasting = {key: value for key, value in status.items() if key not in MOVING}
    lasting["environments"] = [
        {key: value for key, value in item.items() if key != "leased"}
        for item in status.get("environments", ())
    ]
    lasting["phases"] = [
        {key: value for key, value in item.items() if key != "step"}
        for item in status.get("phases", ())
    ]
    return lasting


def _notes(before: StatusModel, after: StatusModel) -> list[Note]:
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
        message = f"the run may continue: the hold {hold.reason} of {hold.since} has ended"
        notes.append(Note(name=f"hold-{hold.since}", reason="HoldEnded", message=message))
    intent = getattr(after, "intent", None)
    if (
        intent is not None
        and intent.type == "Restart"
        and intent != getattr(before, "intent", None)
    ):
        who = intent.role or "every role"
        message = f"{who} restarts as attempt {intent.attempt}: {intent.message}"
        notes.append(
            Note(
                name=f"restart-{intent.attempt}",
                reason=intent.reason,
                message=message,
                is_warning=True,
            )
        )
    return notes


def _conditions(status: StatusModel) -> Sequence[Condition]:
    found: Sequence[Condition] = getattr(status, "conditions", ())
    return found
