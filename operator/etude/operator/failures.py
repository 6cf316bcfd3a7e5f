"""What went wrong in the pods of a role."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from etude.operator import names
from etude.operator.manifests import Manifest, is_deleting, is_true, labels

PULL_FAILURES = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
CRASHES = {"CrashLoopBackOff", "CreateContainerError", "CreateContainerConfigError", "RunError"}

DISRUPTION = "DisruptionTarget"
"""Condition of a pod that is evicted, drained away, preempted, or whose node is lost.

It comes with the deletion of the pod, and never with one of ours.
"""


class PodFailure(NamedTuple):
    """One pod's container ended on its own, or a condition of the pod became True."""

    role: str
    pod: str
    reason: str
    exit_code: int | None
    """Of the container; None for a condition, whose type is the reason."""
    message: str
    restarts: int = 0
    """How often the kubelet has restarted the container in place."""


def failures(role: str, pods: Iterable[Manifest], awaited: Iterable[str] = ()) -> list[PodFailure]:
    """The failures of a role's pods; a pod that is told to go does not fail by going.

    Its disruption is one nevertheless, where somebody has a rule for it: between the condition and
    the deletion lie milliseconds, and then all the time that the pod has to end in order.

    Args:
        role: the role.
        pods: its pods.
        awaited: types of conditions that somebody has a rule for.
    """
    found = []
    for pod in pods:
        is_going = is_deleting(pod)
        found += _met(role, pod, {DISRUPTION}.intersection(awaited) if is_going else set(awaited))
        if is_going or is_true(pod, DISRUPTION):
            continue  # whatever ends in it was ended
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = _ended(container)
            if ended is not None:
                found.append(_failure(role, pod, container, ended))
    return found


def _met(role: str, pod: Manifest, awaited: Set[str]) -> list[PodFailure]:
    return [
        PodFailure(
            role=role,
            pod=pod["metadata"]["name"],
            reason=condition["type"],
            exit_code=None,
            message=condition.get("message") or condition.get("reason") or "",
        )
        for condition in pod.get("status", {}).get("conditions") or ()
        if condition["type"] in awaited and condition["status"] == "True"
    ]


def trouble(pods: Sequence[Manifest], reasons: set[str]) -> str:
    """The first pod that waits for one of these reasons, as a sentence; empty if none does."""
    for pod in pods:
        for container in _containers(pod):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in reasons:
                text = waiting.get("message") or waiting["reason"]
                ended = _ended(container)
                words = (ended or {}).get("message", "")
                return f"{pod['metadata']['name']}: {text}" + (f": {words}" if words else "")
    return ""


def _containers(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """Every container that says something, those first that the others wait for."""
    status = pod.get("status", {})
    for part in ("initContainerStatuses", "containerStatuses"):
        yield from status.get(part) or ()


def unschedulable(pods: Sequence[Manifest]) -> str:
    """The scheduler's words about the first pod without a node; empty if all have one."""
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{pod['metadata']['name']}: {condition.get('message', 'no node takes it')}"
    return ""


def of_attempt(pods: Iterable[Manifest], attempt: int) -> list[Manifest]:
    """The pods of one attempt."""
    return [pod for pod in pods if labels(pod).get(names.ATTEMPT, "0") == str(attempt)]


def _ended(container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How a container ended, the present time or the time before."""
    for state in (container.get("state"), container.get("lastState")):
        ended: Mapping[str, Any] | None = (state or {}).get("terminated")
        if ended:
            return ended
    return None


def _failure(
    role: str, pod: Manifest, container: Mapping[str, Any], ended: Mapping[str, Any]
) -> PodFailure:
    return PodFailure(
        role=role,
        pod=pod["metadata"]["name"],
        reason=ended.get("reason") or "Error",
        exit_code=ended.get("exitCode", 0),
        message=ended.get("message", ""),
        restarts=container.get("restartCount", 0),
    )
