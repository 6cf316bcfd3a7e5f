"""How long pods that are placed together have waited for it."""

from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.operator.actions import Moment
from etude.operator.clock import seconds
from etude.operator.manifests import Manifest, condition, is_deleting
from etude.operator.runs.seen import Seen


class Wait(NamedTuple):
    """Pods of a gang that have no machine."""

    left_s: float
    """Until the gang should have had its machines; below 0 once that is over."""
    words: str
    """What their scheduler says, or how many there are."""
    is_refused: bool
    """Whether the scheduler says that they cannot be placed now."""


def wait(run: RLRun, seen: Seen, now: Moment) -> Wait | None:
    """What the gang of a run waits for; None without a gang, and once it has its machines."""
    gang = run.spec.scheduling.gang
    if gang is None:
        return None
    pods = [pod for of_role in seen.pods.values() for pod in of_role if not is_deleting(pod)]
    waiting = [pod for pod in pods if not pod["spec"].get("nodeName")]
    if not waiting:
        return None
    since_s = min(seconds(pod["metadata"]["creationTimestamp"]) for pod in waiting)
    said = _said(seen)
    words = said or f"{len(waiting)} of {len(pods)} pods have no node"
    return Wait(since_s + gang.timeout_seconds - now.wall_s, words, bool(said))


def waits_s(run: RLRun, seen: Seen, now: Moment) -> list[float]:
    """After how long there is something new to say, if no event does."""
    found = wait(run, seen, now)
    return [] if found is None else [found.left_s]


def _said(seen: Seen) -> str:
    """The scheduler's words about the first group that it cannot place."""
    for key, group in seen.children.items():
        if key.kind == "PodGroup" and _is_refused(group):
            refusal = condition(group, "Unschedulable")
            return f"PodGroup {key.name}: {refusal.get('message') or refusal.get('reason', '')}"
    return ""


def _is_refused(group: Manifest) -> bool:
    """Volcano leaves a refusal as it was once the group has its machines, and says so beside it."""
    refusal, placed = condition(group, "Unschedulable"), condition(group, "Scheduled")
    if refusal.get("status") != "True":
        return False
    since, ended = refusal.get("lastTransitionTime", ""), placed.get("lastTransitionTime", "")
    return placed.get("status") != "True" or since > ended
