"""Gang scheduling: the wait of pods that are placed together or not at all."""

from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.operator.actions import ClockReading
from etude.operator.clock import parse_rfc3339
from etude.operator.manifests import Manifest, condition, is_deleting
from etude.operator.runs.observe import ObservedRun


class GangWait(NamedTuple):
    """Unscheduled pods of a gang."""

    left_s: float
    """Until gang.timeoutSeconds is over; negative after that."""
    message: str
    """The scheduler's message, or the number of unscheduled pods."""
    is_unschedulable: bool
    """The scheduler reports that they cannot be placed now."""


def gang_wait(run: RLRun, observed: ObservedRun, now: ClockReading) -> GangWait | None:
    """The wait of a run's gang; None without a gang, and once all its pods have a node."""
    gang = run.spec.scheduling.gang
    if gang is None:
        return None
    pods = [pod for of_role in observed.pods.values() for pod in of_role if not is_deleting(pod)]
    waiting = [pod for pod in pods if not pod["spec"].get("nodeName")]
    if not waiting:
        return None
    since_s = min(parse_rfc3339(pod["metadata"]["creationTimestamp"]) for pod in waiting)
    said = _unschedulable_message(observed)
    words = said or f"{len(waiting)} of {len(pods)} pods have no node"
    return GangWait(since_s + gang.timeout_seconds - now.wall_s, words, bool(said))


def waits_s(run: RLRun, observed: ObservedRun, now: ClockReading) -> list[float]:
    """Seconds until the gang's timeout, which no event announces."""
    found = gang_wait(run, observed, now)
    return [] if found is None else [found.left_s]


def _unschedulable_message(observed: ObservedRun) -> str:
    """The scheduler's message about the first PodGroup that it cannot place."""
    for key, group in observed.children.items():
        if key.kind == "PodGroup" and _is_unschedulable(group):
            refusal = condition(group, "Unschedulable")
            return f"PodGroup {key.name}: {refusal.get('message') or refusal.get('reason', '')}"
    return ""


def _is_unschedulable(group: Manifest) -> bool:
    """The group is unschedulable now: Volcano keeps an old refusal after a newer Scheduled."""
    refusal, placed = condition(group, "Unschedulable"), condition(group, "Scheduled")
    if refusal.get("status") != "True":
        return False
    since, ended = refusal.get("lastTransitionTime", ""), placed.get("lastTransitionTime", "")
    return placed.get("status") != "True" or since > ended
