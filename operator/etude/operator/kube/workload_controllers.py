"""StatefulSet, Deployment and Job controllers as pure functions, for clusters in memory."""

from collections.abc import Sequence
from typing import NamedTuple

from etude.operator.clock import rfc3339
from etude.operator.manifests import Manifest, Ref, is_deleting, is_true, ref, uid

JOB_COMPLETE = "Complete"
JOB_FAILED = "Failed"


class PodChanges(NamedTuple):
    """Pods to create and to delete."""

    creates: list[Manifest]
    deletes: list[Ref]


def stateful_set_changes(stateful_set: Manifest, pods: Sequence[Manifest]) -> PodChanges:
    """Keep pods of all ordinals; an ordinal is free once its last pod is deleted."""
    wanted = [
        f"{stateful_set['metadata']['name']}-{ordinal}"
        for ordinal in range(stateful_set["spec"].get("replicas", 1))
    ]
    if is_deleting(stateful_set):
        wanted = []
    existing = {pod["metadata"]["name"]: pod for pod in pods}
    creates = [_pod_of(stateful_set, name) for name in wanted if name not in existing]
    deletes = [
        ref(pod) for name, pod in existing.items() if name not in wanted and not is_deleting(pod)
    ]
    return PodChanges(creates, deletes)


def job_changes(job: Manifest, pods: Sequence[Manifest]) -> PodChanges:
    """Run one pod at a time until one succeeds or too many failed."""
    if is_deleting(job) or job_status(job, pods) is not None:
        return PodChanges([], [])
    phases = [pod.get("status", {}).get("phase", "Pending") for pod in pods]
    if all(phase == "Failed" for phase in phases):
        return PodChanges([_pod_of(job, f"{job['metadata']['name']}-{len(pods)}")], [])
    return PodChanges([], [])


def job_status(job: Manifest, pods: Sequence[Manifest]) -> str | None:
    """Complete or Failed of a finished Job."""
    for kind in (JOB_COMPLETE, JOB_FAILED):
        if is_true(job, kind):
            return kind
    phases = [pod.get("status", {}).get("phase") for pod in pods]
    if "Succeeded" in phases:
        return JOB_COMPLETE
    if phases.count("Failed") > job["spec"].get("backoffLimit", 6):
        return JOB_FAILED
    return None


def ready_status(pod: Manifest) -> Manifest:
    """The status of a pod with only ready containers."""
    return {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {"name": c["name"], "ready": True, "restartCount": 0, "state": {"running": {}}}
            for c in pod["spec"]["containers"]
        ],
    }


def finished_job(kind: str, now_s: float) -> Manifest:
    """The status of a finished Job."""
    condition = {"type": kind, "status": "True", "lastTransitionTime": rfc3339(now_s)}
    return {"conditions": [condition], "completionTime": rfc3339(now_s)}


def _pod_of(owner: Manifest, name: str) -> Manifest:
    template = owner["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": owner["metadata"].get("namespace", "default"),
            "labels": dict(template["metadata"].get("labels", {})),
            "annotations": dict(template["metadata"].get("annotations", {})),
            "ownerReferences": [
                {
                    "apiVersion": owner["apiVersion"],
                    "kind": owner["kind"],
                    "name": owner["metadata"]["name"],
                    "uid": uid(owner),
                    "controller": True,
                }
            ],
        },
        "spec": template["spec"],
    }
