"""Disrupted pods: evicted, drained or preempted, counted but never held against the run."""

from collections.abc import Iterator, Mapping, Sequence

from etude.common.api.run.status import Restarts
from etude.operator.actions import Delete
from etude.operator.manifests import Manifest, is_deleting, is_true, ref, uid
from etude.operator.pod_failures import DISRUPTION

STARTING_GRACE_S = 5
"""The first process of a container hears no signal before it has a handler for it, and a pod that
starts has nothing to save."""

MAX_REMEMBERED = 256


def noted(restarts: Restarts, pods: Mapping[str, Sequence[Manifest]]) -> Restarts:
    """The restart counters with every disrupted pod counted once.

    Args:
        restarts: counters so far.
        pods: of the run, by role.
    """
    disrupted_now = [
        uid(pod) for of_role in pods.values() for pod in of_role if is_true(pod, DISRUPTION)
    ]
    known = [each for each in restarts.disrupted if each in disrupted_now]
    # What there is no room to remember is counted once there is, so that nothing is counted twice.
    new = [each for each in disrupted_now if each not in known][: MAX_REMEMBERED - len(known)]
    disrupted = (*known, *new)
    if disrupted == restarts.disrupted:
        return restarts
    return restarts.model_copy(update={"infra": restarts.infra + len(new), "disrupted": disrupted})


def hurried(pods: Mapping[str, Sequence[Manifest]]) -> Iterator[Delete]:
    """Delete terminating pods that are still starting, with a short grace period."""
    for of_role in pods.values():
        for pod in of_role:
            grace_s = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            if is_deleting(pod) and grace_s > STARTING_GRACE_S and is_starting(pod):
                yield Delete(ref=ref(pod), uid=uid(pod), grace_s=STARTING_GRACE_S)


def is_starting(pod: Manifest) -> bool:
    """No container of a scheduled pod has answered its startup probe yet."""
    found = pod.get("status", {}).get("containerStatuses") or ()
    return bool(found) and all(
        container.get("started") is False and not container.get("restartCount")
        for container in found
    )
