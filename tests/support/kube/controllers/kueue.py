"""Kueue: admits Workloads by quota, takes quota back, and starts and stops queued JobSets.

Contract (https://kueue.sigs.k8s.io/docs/concepts/workload, …/tasks/run/jobsets,
…/tasks/dev/integrate_a_custom_job):

- A Workload whose pod sets fit into its ClusterQueue gets `status.admission`, QuotaReserved and
  Admitted; Evicted becomes False. The higher `spec.priority` comes first, then the older.
- A Workload that has quota while the ClusterQueue's `stopPolicy` is HoldAndDrain, or while one of
  higher priority waits and does not fit, gets Evicted=True (ClusterQueueStopped, Preempted), and
  keeps its quota until whoever runs it clears the reservation.
- A JobSet with a queue's label has a Workload of its own. It is unsuspended when that is admitted,
  with the node labels of the assigned flavors as node selectors, and suspended when that is
  evicted; once its Jobs have no pods, the reservation is cleared.
- A Workload that is Finished has no quota.

Quota is counted in the requests of one resource; the first flavor that has room is taken.
"""

from collections.abc import Iterator
from decimal import Decimal

from tests.support.kube.controllers.client import Client, Manifest
from tests.support.kube.controllers.objects import (
    controller,
    is_deleting,
    is_true,
    owner_uid,
    path,
    said,
)

API = "kueue.x-k8s.io/v1beta2"
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"


async def kueue(client: Client) -> None:
    """One look at every queued JobSet and every ClusterQueue."""
    workloads = [w for w in await client.every(f"/apis/{API}/workloads") if not is_deleting(w)]
    for job_set in await client.every("/apis/jobset.x-k8s.io/v1alpha2/jobsets"):
        if QUEUE in job_set["metadata"].get("labels", {}) and not is_deleting(job_set):
            await _job_set(client, job_set, workloads)
    locals_ = await client.every(f"/apis/{API}/localqueues")
    for queue in await client.every(f"/apis/{API}/clusterqueues"):
        its = {
            (each["metadata"]["namespace"], each["metadata"]["name"])
            for each in locals_
            if each["spec"]["clusterQueue"] == queue["metadata"]["name"]
        }
        await _cluster_queue(
            client,
            queue,
            [w for w in workloads if (w["metadata"]["namespace"], w["spec"]["queueName"]) in its],
        )


async def _cluster_queue(client: Client, queue: Manifest, workloads: list[Manifest]) -> None:
    asking = sorted((w for w in workloads if not is_true(w, "Finished")), key=_turn)
    holding = [w for w in asking if is_true(w, "QuotaReserved")]
    if queue["spec"].get("stopPolicy", "None") == "HoldAndDrain":
        for each in holding:
            await _evict(client, each, "ClusterQueueStopped")
        return
    waiting = (w for w in asking if not is_true(w, "QuotaReserved"))
    for each in waiting:
        flavor = _room(queue, each, holding)
        if flavor is not None:
            await _admit(client, queue, each, flavor)
            return
        lower = [w for w in reversed(holding) if _priority(w) < _priority(each)]
        if lower:
            await _evict(client, lower[0], "Preempted")
        return


def _turn(workload: Manifest) -> tuple[int, str, str]:
    metadata = workload["metadata"]
    return -_priority(workload), metadata["creationTimestamp"], metadata["name"]


def _priority(workload: Manifest) -> int:
    return int(workload["spec"].get("priority", 0))


def _room(queue: Manifest, workload: Manifest, holding: list[Manifest]) -> tuple[str, str] | None:
    """The resource and the flavor in which a Workload fits as a whole."""
    (group,) = queue["spec"]["resourceGroups"]
    (resource,) = group["coveredResources"]
    for flavor in group["flavors"]:
        quota = _number(flavor["resources"][0]["nominalQuota"])
        used = sum(
            (_asked(w, resource) for w in holding if flavor["name"] in set(_flavors(w))), Decimal(0)
        )
        if used + _asked(workload, resource) <= quota:
            return resource, flavor["name"]
    return None


def _flavors(workload: Manifest) -> Iterator[str]:
    for each in workload["status"]["admission"]["podSetAssignments"]:
        yield from each.get("flavors", {}).values()


def _asked(workload: Manifest, resource: str) -> Decimal:
    return sum(
        (
            each["count"] * _number(c.get("resources", {}).get("requests", {}).get(resource, "0"))
            for each in workload["spec"]["podSets"]
            for c in each["template"]["spec"]["containers"]
        ),
        Decimal(0),
    )


def _number(quantity: str | int) -> Decimal:
    text = str(quantity)
    return Decimal(text[:-1]) / 1000 if text.endswith("m") else Decimal(text)


async def _admit(client: Client, queue: Manifest, workload: Manifest, got: tuple[str, str]) -> None:
    resource, flavor = got
    admission = {
        "clusterQueue": queue["metadata"]["name"],
        "podSetAssignments": [
            {"name": each["name"], "count": each["count"], "flavors": {resource: flavor}}
            for each in workload["spec"]["podSets"]
        ],
    }
    facts = {"QuotaReserved": (True, "QuotaReserved"), "Admitted": (True, "Admitted")}
    if is_true(workload, "Evicted"):
        facts["Evicted"] = (False, "QuotaReserved")
    await _say(client, workload, said(workload, **facts), admission)


async def _evict(client: Client, workload: Manifest, reason: str) -> None:
    if not is_true(workload, "Evicted"):
        admission = workload["status"]["admission"]
        await _say(client, workload, said(workload, Evicted=(True, reason)), admission)


async def _clear(client: Client, workload: Manifest) -> None:
    gone = said(
        workload,
        QuotaReserved=(False, "Pending"),
        Admitted=(False, "NoReservation"),
        Requeued=(True, "Preempted"),
    )
    await _say(client, workload, gone, None)


async def _say(
    client: Client, workload: Manifest, conditions: list[Manifest], admission: Manifest | None
) -> None:
    metadata = workload["metadata"]
    at = path(API, metadata["namespace"], "workloads", metadata["name"], "status")
    version = {"resourceVersion": metadata["resourceVersion"]}
    status = {"conditions": conditions, "admission": admission}
    await client.patch(at, {"metadata": version, "status": status})


async def _job_set(client: Client, job_set: Manifest, workloads: list[Manifest]) -> None:
    metadata, spec = job_set["metadata"], job_set["spec"]
    own = next((w for w in workloads if owner_uid(w) == metadata["uid"]), None)
    if own is None:
        await client.create(
            path(API, metadata["namespace"], "workloads"), await _workload_of(client, job_set)
        )
        return
    at = path("jobset.x-k8s.io/v1alpha2", metadata["namespace"], "jobsets", metadata["name"])
    if is_true(own, "Evicted"):
        if not spec.get("suspend", False):
            await client.patch(at, {"spec": {"suspend": True}})
        elif is_true(own, "QuotaReserved") and await _is_idle(client, job_set):
            await _clear(client, own)
    elif is_true(own, "Admitted") and spec.get("suspend", False):
        await client.patch(at, {"spec": await _placed(client, job_set, own)})


async def _workload_of(client: Client, job_set: Manifest) -> Manifest:
    metadata = job_set["metadata"]
    spec: Manifest = {
        "queueName": metadata["labels"][QUEUE],
        "podSets": [
            {
                "name": part["name"],
                "count": part["replicas"] * part["template"]["spec"]["parallelism"],
                "template": part["template"]["spec"]["template"],
            }
            for part in job_set["spec"]["replicatedJobs"]
        ],
    }
    name = metadata["labels"].get(PRIORITY)
    if name is not None:
        known = await client.get(f"/apis/{API}/workloadpriorityclasses/{name}") or {"value": 0}
        group = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass"}
        spec |= {"priorityClassRef": {**group, "name": name}, "priority": known["value"]}
    return {
        "apiVersion": API,
        "kind": "Workload",
        "metadata": {
            "name": f"jobset-{metadata['name']}",
            "ownerReferences": controller(job_set, "jobset.x-k8s.io/v1alpha2", "JobSet"),
        },
        "spec": spec,
    }


async def _is_idle(client: Client, job_set: Manifest) -> bool:
    namespace = job_set["metadata"]["namespace"]
    jobs = await client.every(path("batch/v1", namespace, "jobs"))
    its = {j["metadata"]["uid"] for j in jobs if owner_uid(j) == job_set["metadata"]["uid"]}
    pods = await client.every(path("v1", namespace, "pods"))
    return not any(owner_uid(pod) in its for pod in pods)


async def _placed(client: Client, job_set: Manifest, workload: Manifest) -> Manifest:
    """The JobSet's spec when it starts: on machines of the flavors that it was given."""
    parts = job_set["spec"]["replicatedJobs"]
    assigned = workload["status"]["admission"]["podSetAssignments"]
    for part, got in zip(parts, assigned, strict=True):
        pod = part["template"]["spec"]["template"]["spec"]
        for name in set(got["flavors"].values()):
            flavor = await client.get(f"/apis/{API}/resourceflavors/{name}")
            pod["nodeSelector"] = pod.get("nodeSelector", {}) | (flavor or {})["spec"].get(
                "nodeLabels", {}
            )
    return {"suspend": False, "replicatedJobs": parts}
