"""Pod failures: ended containers, disruptions, pods that do not start."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from etude.operator import names
from etude.operator.manifests import Manifest, is_deleting, is_true, labels

PULL_FAILURES = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
CRASHES = {"CrashLoopBackOff", "CreateContainerError", "CreateContainerConfigError", "RunError"}

CONFIGURATION_EXITS = {64, 78}
"""EX_USAGE and EX_CONFIG of sysexits.h: a restart would only repeat them."""

DISRUPTION = "DisruptionTarget"
"""Condition of a pod that is evicted, drained, preempted or lost with its node.

It precedes the deletion of the pod, but never a deletion by the operator.
"""


class PodFailure(NamedTuple):
    """A container that ended on its own, or a condition of a pod that became True."""

    role: str
    pod: str
    reason: str
    exit_code: int | None
    """Exit code of the container; None for a condition, whose type is the reason."""
    message: str
    restarts: int = 0
    """Restarts of the container by the kubelet."""
    head_exit_code: int | None = None
    """Exit code of the Ray head that this worker lost before it ended; None for all others."""


def find_failures(
    role: str, pods: Iterable[Manifest], awaited: Iterable[str] = ()
) -> list[PodFailure]:
    """The failures of a role's pods; a terminating pod does not fail by terminating.

    Its disruption does count if a failure rule names it: the deletion follows the condition within
    milliseconds, and the pod's grace period follows that.

    Args:
        role: the role.
        pods: its pods.
        awaited: condition types that failure rules name.
    """
    found = []
    pods = list(pods)
    head_end = _find_head_end(role, pods)
    for pod in pods:
        is_going = is_deleting(pod)
        found += _true_conditions(
            role, pod, {DISRUPTION}.intersection(awaited) if is_going else set(awaited)
        )
        if is_going or is_true(pod, DISRUPTION):
            continue  # its containers were told to end
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = _termination(container)
            if ended is not None:
                failure = _container_failure(role, pod, container, ended)
                if head_end is not None and head_end.explains(pod, ended):
                    failure = failure._replace(head_exit_code=head_end.exit_code)
                found.append(failure)
    return found


class _HeadEnd(NamedTuple):
    """The newest end of a Ray head's container; its workers lose their cluster with it."""

    exit_code: int
    finished: str
    restarted: str
    """Start of the container that runs now; empty for none."""

    def explains(self, pod: Manifest, ended: Mapping[str, Any]) -> bool:
        """True if a container of a worker ended after the head did, and began before it was back.

        Times are Kubernetes' own, whose order is that of their text.
        """
        return (
            labels(pod).get(names.RAY_NODE) == "worker"
            and ended.get("finishedAt", "") >= self.finished
            and (not self.restarted or ended.get("startedAt", "") < self.restarted)
        )


def _find_head_end(role: str, pods: Iterable[Manifest]) -> _HeadEnd | None:
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = _termination(container)
            is_head = labels(pod).get(names.RAY_NODE) == "head" and container["name"] == role
            if is_head and ended is not None:
                running = container.get("state", {}).get("running") or {}
                return _HeadEnd(
                    ended.get("exitCode", 0),
                    ended.get("finishedAt", ""),
                    running.get("startedAt", ""),
                )
    return None


def _true_conditions(role: str, pod: Manifest, awaited: Set[str]) -> list[PodFailure]:
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


def waiting_message(pods: Sequence[Manifest], reasons: set[str]) -> str:
    """Name and message of the first pod that waits for one of these reasons; else empty."""
    for pod in pods:
        for container in _container_statuses(pod):
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in reasons:
                text = waiting.get("message") or waiting["reason"]
                ended = _termination(container)
                words = (ended or {}).get("message", "")
                return f"{pod['metadata']['name']}: {text}" + (f": {words}" if words else "")
    return ""


def _container_statuses(pod: Manifest) -> Iterator[Mapping[str, Any]]:
    """Statuses of all containers, init containers first."""
    status = pod.get("status", {})
    for part in ("initContainerStatuses", "containerStatuses"):
        yield from status.get(part) or ()


def unschedulable_message(pods: Sequence[Manifest]) -> str:
    """The scheduler's message about the first pod without a node; empty if all have one."""
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or ():
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{pod['metadata']['name']}: {condition.get('message', 'no node takes it')}"
    return ""


def pods_of_attempt(pods: Iterable[Manifest], attempt: int) -> list[Manifest]:
    """The pods of one attempt."""
    return [pod for pod in pods if labels(pod).get(names.ATTEMPT, "0") == str(attempt)]


def _termination(container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for state in (container.get("state"), container.get("lastState")):
        ended: Mapping[str, Any] | None = (state or {}).get("terminated")
        if ended:
            return ended
    return None


def _container_failure(
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
