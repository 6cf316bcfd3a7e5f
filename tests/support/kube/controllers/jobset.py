"""JobSet's controller: a Job for every replica of every replicated Job, all at once.

Contract (https://jobset.sigs.k8s.io/docs): Jobs are named `<jobset>-<replicatedJob>-<index>`, are
controlled by the JobSet and labelled with its name; all of them are made together, and together
suspended while `spec.suspend` is true. Resumed Jobs get the pod templates that the JobSet has by
then: that is how a queue places them. Pods are the real Job controller's.
"""

import copy

from tests.support.kube.controllers.client import Client, Manifest
from tests.support.kube.controllers.objects import controller, is_deleting, path, said

API = "jobset.x-k8s.io/v1alpha2"


async def jobset(client: Client) -> None:
    """One look at every JobSet."""
    for each in await client.every(f"/apis/{API}/jobsets"):
        if not is_deleting(each):
            await _reconcile(client, each)


async def _reconcile(client: Client, job_set: Manifest) -> None:
    namespace = job_set["metadata"]["namespace"]
    wants_suspended = job_set["spec"].get("suspend", False)
    for part in job_set["spec"]["replicatedJobs"]:
        for index in range(part.get("replicas", 1)):
            wanted = _job(job_set, part, index)
            name = wanted["metadata"]["name"]
            live = await client.get(path("batch/v1", namespace, "jobs", name))
            if live is None:
                await client.create(path("batch/v1", namespace, "jobs"), wanted)
            elif live["spec"].get("suspend", False) != wants_suspended and not is_deleting(live):
                await client.patch(
                    path("batch/v1", namespace, "jobs", name),
                    _turned(wanted, is_suspended=wants_suspended),
                )
    conditions = said(job_set, Suspended=(wants_suspended, "SuspendedJobs"))
    if conditions != job_set.get("status", {}).get("conditions"):
        at = path(API, namespace, "jobsets", job_set["metadata"]["name"], "status")
        await client.patch(at, {"status": {"conditions": conditions}})


def _job(job_set: Manifest, part: Manifest, index: int) -> Manifest:
    metadata = job_set["metadata"]
    template = copy.deepcopy(part["template"])
    labels = {
        "jobset.sigs.k8s.io/jobset-name": metadata["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": part["name"],
        "jobset.sigs.k8s.io/job-index": str(index),
    }
    pod = template["spec"]["template"]
    pod.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
    template["spec"]["suspend"] = job_set["spec"].get("suspend", False)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{metadata['name']}-{part['name']}-{index}",
            "namespace": metadata["namespace"],
            "labels": template.get("metadata", {}).get("labels", {}) | labels,
            "ownerReferences": controller(job_set, API, "JobSet"),
        },
        "spec": template["spec"],
    }


def _turned(wanted: Manifest, *, is_suspended: bool) -> Manifest:
    """The change that stops a Job, or starts it with the placement that it has by now."""
    if is_suspended:
        return {"spec": {"suspend": True}}
    selector = wanted["spec"]["template"]["spec"].get("nodeSelector")
    return {"spec": {"suspend": False, "template": {"spec": {"nodeSelector": selector}}}}
