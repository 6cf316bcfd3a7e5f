"""Event recorder: publishes Kubernetes Events, limited by a token bucket per object."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.common.api.meta import Condition
from etude.common.api.status_types import StatusModel
from etude.common.token_bucket import TokenBucket
from etude.operator import metrics
from etude.operator.actions import RecordEvent
from etude.operator.clock import Clock, rfc3339_micro
from etude.operator.conditions import condition_transitions
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, uid

EVENTS_PER_S = 0.1
EVENT_BURST = 100.0
"""Events of one object in a burst; kubelets have 25. A flapping condition is in its status."""

MOST_NAME, MOST_REASON, MOST_NOTE = 230, 128, 1024
"""Limits of the API server, in bytes."""

REPORTER = "etude.dev/operator"


@dataclass(slots=True)
class EventRecorder:
    """Publishes the Events of all objects."""

    cluster: Cluster
    clock: Clock
    instance: str
    _tokens: dict[str, TokenBucket] = field(default_factory=dict)
    """By uid of the object."""

    async def record(self, about: Manifest, event: RecordEvent) -> None:
        """Publish an Event about an object, unless its token bucket is empty.

        An Event repeats what the status or the controller's log contains.
        """
        now_s = self.clock.monotonic_s()
        full = TokenBucket.full(EVENTS_PER_S, EVENT_BURST, at_s=now_s)
        tokens = self._tokens.get(uid(about), full).refill(now_s)
        if tokens.wait_s() > 0:
            metrics.EVENTS_DROPPED.inc()
            return
        self._tokens[uid(about)] = tokens.take()
        await self.cluster.record_event(self._event(about, event))

    def forget(self, gone_uid: str) -> None:
        self._tokens.pop(gone_uid, None)

    def _event(self, about: Manifest, event: RecordEvent) -> Manifest:
        metadata = about["metadata"]
        digest = hashlib.sha256(f"{uid(about)}/{event.name}".encode()).hexdigest()[:16]
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {
                "name": f"{_truncate(metadata['name'], MOST_NAME).rstrip('-.')}.{digest}",
                "namespace": metadata.get("namespace", "default"),
            },
            "eventTime": rfc3339_micro(self.clock.wall_s()),
            "reportingController": REPORTER,
            "reportingInstance": self.instance,
            "action": "Reconcile",
            "reason": _truncate(event.reason, MOST_REASON),
            "note": _truncate(event.message, MOST_NOTE),
            "type": "Warning" if event.is_warning else "Normal",
            "regarding": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata.get("namespace", "default"),
                "uid": uid(about),
            },
        }


def _truncate(text: str, limit: int) -> str:
    return text.encode()[:limit].decode(errors="ignore")


def status_events(before: StatusModel, after: StatusModel) -> list[RecordEvent]:
    """Events about the changes of a status: conditions, an ended hold, a restart."""
    events = [
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
        events.append(RecordEvent(name=f"hold-{hold.since}", reason="HoldEnded", message=message))
    intent = getattr(after, "intent", None)
    if (
        intent is not None
        and intent.type == "Restart"
        and intent != getattr(before, "intent", None)
    ):
        who = intent.role or "every role"
        message = f"{who} restarts as attempt {intent.attempt}: {intent.message}"
        events.append(
            RecordEvent(
                name=f"restart-{intent.attempt}",
                reason=intent.reason,
                message=message,
                is_warning=True,
            )
        )
    return events


def _conditions(status: StatusModel) -> Sequence[Condition]:
    found: Sequence[Condition] = getattr(status, "conditions", ())
    return found
