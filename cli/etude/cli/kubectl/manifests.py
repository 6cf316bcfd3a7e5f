"""Objects of Kubernetes as mappings: names, labels, conditions and Events."""

from collections.abc import Iterable, Mapping
from typing import Any

Manifest = Mapping[str, Any]

ENDS = ("Complete", "Failed")
"""Conditions that end a run."""


def name_of(manifest: Manifest) -> str:
    """The object's metadata.name."""
    return str(manifest["metadata"]["name"])


def labels_of(manifest: Manifest) -> Mapping[str, str]:
    """The object's labels."""
    found: Mapping[str, str] = manifest["metadata"].get("labels") or {}
    return found


def condition_of(manifest: Manifest, kind: str) -> Manifest:
    """One condition of an object's status; empty without one."""
    found = manifest.get("status", {}).get("conditions") or ()
    return next((each for each in found if each.get("type") == kind), {})


def is_terminating(manifest: Manifest) -> bool:
    """True if the object is terminating: it has a deletion timestamp."""
    return bool(manifest["metadata"].get("deletionTimestamp"))


def events_about(manifest: Manifest, events: Iterable[Manifest]) -> list[Manifest]:
    """The Events of one object, oldest first."""
    uid = manifest["metadata"].get("uid")
    return sorted((each for each in events if _regards(each, uid)), key=event_time)


def _regards(event: Manifest, uid: object) -> bool:
    return bool(uid) and event.get("involvedObject", {}).get("uid") == uid


def event_time(event: Manifest) -> str:
    """Time at which an Event was last seen, RFC 3339."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next((each for each in times if each), ""))


def terminal_condition(run: Manifest) -> str:
    """The condition by which a run is over; empty while it is not."""
    return next((kind for kind in ENDS if condition_of(run, kind).get("status") == "True"), "")
