"""What follows from a failure in the pods of a role: the first matching rule."""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from etude.operator import names
from etude.operator.manifests import Manifest, is_deleting, is_true, labels

CONFIGURATION_EXITS = {64, 78}
"""EX_USAGE and EX_CONFIG of sysexits.h: a restart would only repeat them."""

RESTARTS_IN_PLACE = 5
"""The kubelet restarts engines and rewards in place this often before their pods are replaced."""

PULL_FAILURES = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
CRASHES = {"CrashLoopBackOff", "CreateContainerError", "CreateContainerConfigError", "RunError"}


class Verdict(Enum):
    """What a failure leads to."""

    IGNORE = "the kubelet or the StatefulSet puts it right"
    RESTART = "the role starts anew as the next attempt"
    FAIL = "the run is over"


class PodFailure(NamedTuple):
    """One pod's container ended on its own."""

    role: str
    pod: str
    reason: str
    exit_code: int
    message: str
    restarts: int


def failures(role: str, pods: Iterable[Manifest]) -> list[PodFailure]:
    """The failures of a role's pods; a pod that is told to go does not fail by going."""
    found = []
    for pod in pods:
        if is_deleting(pod) or is_true(pod, "DisruptionTarget"):
            continue
        for container in pod.get("status", {}).get("containerStatuses") or ():
            ended = _ended(container)
            if ended is not None:
                found.append(_failure(role, pod, container, ended))
    return found


def verdict(failure: PodFailure) -> Verdict:
    """The rule for one failure.

    The trainer is replaced at once, as a new attempt with a new epoch. Engines and rewards hold
    nothing that is worth a new attempt: the kubelet restarts them, up to a limit.
    """
    if failure.exit_code in CONFIGURATION_EXITS:
        return Verdict.FAIL
    if failure.role == names.TRAINER or failure.restarts >= RESTARTS_IN_PLACE:
        return Verdict.RESTART
    return Verdict.IGNORE


def worst(found: Iterable[PodFailure]) -> PodFailure | None:
    """The failure that decides: one that ends the run before one that restarts a role."""
    for wanted in (Verdict.FAIL, Verdict.RESTART):
        for failure in found:
            if verdict(failure) == wanted:
                return failure
    return None


def trouble(pods: Sequence[Manifest], reasons: set[str]) -> str:
    """The first pod that waits for one of these reasons, as a sentence; empty if none does."""
    for pod in pods:
        for container in pod.get("status", {}).get("containerStatuses") or ():
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in reasons:
                text = waiting.get("message") or waiting["reason"]
                ended = _ended(container)
                words = (ended or {}).get("message", "")
                return f"{pod['metadata']['name']}: {text}" + (f": {words}" if words else "")
    return ""


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
