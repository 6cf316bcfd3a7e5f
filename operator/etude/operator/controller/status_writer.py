"""Status writer and event recorder, both with rate limits per object."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from etude.common.api.meta import Condition
from etude.common.api.run.status import StatusModel
from etude.operator import metrics
from etude.operator.actions import RecordEvent
from etude.operator.clock import Clock
from etude.operator.conditions import condition_transitions
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, uid
from etude.operator.token_bucket import TokenBucket

FIGURE_FIELDS = {
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


class StatusDebounce(NamedTuple):
    """Debounce times of status writes, in seconds."""

    figures_s: float = 5.0
    """Least time between two writes of one object that only change figures."""
    transient_s: float = 0.0
    """Time for which a transient status must have differed from the written one, to be written."""


@dataclass(slots=True)
class StatusWriter:
    """Writes statuses and records Events of all objects."""

    cluster: Cluster
    clock: Clock
    instance: str
    debounce: StatusDebounce = field(default_factory=StatusDebounce)
    _states: "dict[str, _WriteState]" = field(default_factory=dict)
    """By uid."""

    async def write(
        self, seen: Manifest, status: StatusModel, *, is_transient: bool = False
    ) -> float | None:
        """Write a status that differs; returns the delay in seconds of a write that was held back.

        Args:
            seen: the object as it was observed.
            status: its new status.
            is_transient: whether the status is transient, and may be superseded before it is written.

        Raises:
            ConflictError: the object has changed since it was observed.
        """
        known = type(status).parse_known_fields(seen.get("status", {}))
        before, after = known.to_json(), status.to_json()
        told = self._state_of(seen)
        if after == before:
            told.differs_s = None
            return None
        now = self.clock.monotonic_s()
        wait_s = told.status_tokens.wait_s(now)
        if is_transient:
            told.differs_s = now if told.differs_s is None else told.differs_s
            wait_s = max(wait_s, told.differs_s + self.debounce.transient_s - now)
        if _without_figures(after) == _without_figures(before):
            wait_s = max(wait_s, told.written_s + self.debounce.figures_s - now)
        if wait_s > 0:
            return wait_s
        await self.cluster.replace_status(seen, after)
        told.status_tokens.take()
        told.written_s, told.differs_s = now, None
        for note in _status_events(known, status):
            await self.record(seen, note)
        return None

    async def record(self, about: Manifest, note: RecordEvent) -> None:
        """Publish an Event about an object, unless its token bucket is empty.

        An Event repeats what the status or the controller's log contains.
        """
        events = self._state_of(about).event_tokens
        if events.wait_s(self.clock.monotonic_s()) > 0:
            metrics.EVENTS_DROPPED.inc()
            return
        events.take()
        await self.cluster.record_event(self._event(about, note))

    def forget(self, gone_uid: str) -> None:
        """Drop the state of a deleted object."""
        self._states.pop(gone_uid, None)

    def _state_of(self, seen: Manifest) -> "_WriteState":
        now = self.clock.monotonic_s()
        return self._states.setdefault(
            uid(seen),
            _WriteState(
                status_tokens=TokenBucket(
                    rate_per_s=STATUSES_PER_S, burst=STATUS_BURST, updated_s=now
                ),
                event_tokens=TokenBucket(rate_per_s=EVENTS_PER_S, burst=EVENT_BURST, updated_s=now),
            ),
        )

    def _event(self, about: Manifest, note: RecordEvent) -> Manifest:
        metadata = about["metadata"]
        digest = hashlib.sha256(f"{uid(about)}/{note.name}".encode()).hexdigest()[:16]
        when = datetime.fromtimestamp(self.clock.wall_s(), UTC)
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{_truncate(metadata['name'], MOST_NAME).rstrip('-.')}.{digest}",
                "namespace": metadata.get("namespace", "default"),
            },
            "eventTime": when.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": REPORTER,
            "reportingInstance": self.instance,
            "action": "Reconcile",
            "reason": _truncate(note.reason, MOST_REASON),
            "note": _truncate(note.message, MOST_NOTE),
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
class _WriteState:
    """Rate limits of one object."""

    status_tokens: TokenBucket
    event_tokens: TokenBucket
    written_s: float = float("-inf")
    """Time of the last status write."""
    differs_s: float | None = None
    """Since when the written status differs, if only by a transient one."""


def _truncate(text: str, limit: int) -> str:
    return text.encode()[:limit].decode(errors="ignore")


def _without_figures(status: Mapping[str, Any]) -> dict[str, Any]:
    lasting = {key: value for key, value in status.items() if key not in FIGURE_FIELDS}
    lasting["environments"] = [
        {key: value for key, value in item.items() if key != "leased"}
        for item in status.get("environments", ())
    ]
    lasting["phases"] = [
        {key: value for key, value in item.items() if key != "step"}
        for item in status.get("phases", ())
    ]
    return lasting


def _status_events(before: StatusModel, after: StatusModel) -> list[RecordEvent]:
    notes = [
        RecordEvent(
            name=f"{item.condition.type}-{item.condition.status}"
            f"-{item.condition.last_transition_time}",
            reason=item.condition.reason,
            message=item.condition.message or f"{item.condition.type} is {item.condition.status}",
            is_warning=item.is_warning,
        )
        for item in condition_transitions(_conditions(before), _conditions(after))
    ]
    hold = getattr(before, "hold", None)
    if hold is not None and getattr(after, "hold", None) is None:
        message = f"the run may continue: the hold {hold.reason} of {hold.since} has ended"
        notes.append(RecordEvent(name=f"hold-{hold.since}", reason="HoldEnded", message=message))
    intent = getattr(after, "intent", None)
    if (
        intent is not None
        and intent.type == "Restart"
        and intent != getattr(before, "intent", None)
    ):
        who = intent.role or "every role"
        message = f"{who} restarts as attempt {intent.attempt}: {intent.message}"
        notes.append(
            RecordEvent(
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
