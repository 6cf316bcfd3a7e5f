"""KubeRay's controller: pods for the head and for every worker, and the head's Service.

Contract (https://docs.ray.io/en/latest/cluster/kubernetes, ray.io/v1): pods are controlled by the
RayCluster, labelled `ray.io/cluster` and `ray.io/node-type`, and have names that none can foresee.
One that is gone is made again. Workers are told where the head is by `FQ_RAY_IP`. The commands of
containers stay where the annotation `ray.io/overwrite-container-cmd` says so, and the cluster that
lacks it is a fault of the test. A worker waits for the head in an init container of its own image.

The Service comes before any pod. Its ports are those of the head's first container by name, or
defaults if that has none; one named `metrics` is added where it is missing (`getServicePorts`,
ray-operator/controllers/ray/common/service.go at 4cf01420).
"""

import copy
from collections.abc import Sequence

from tests.support.kube.controllers.client import Client, Manifest
from tests.support.kube.controllers.objects import controller, is_deleting, is_true, owner_uid, path

API = "ray.io/v1"
DEFAULTS = {"client": 10001, "gcs-server": 6379, "dashboard": 8265, "serve": 8000}
METRICS = {"metrics": 8080}
WAIT = "until ray health-check --address $FQ_RAY_IP:6379; do sleep 5; done"


async def kuberay(client: Client) -> None:
    """One look at every RayCluster.

    Raises:
        ValueError: one would have the commands of its containers replaced.
    """
    for each in await client.every(f"/apis/{API}/rayclusters"):
        if each["metadata"].get("annotations", {}).get("ray.io/overwrite-container-cmd") != "true":
            raise ValueError("KubeRay would replace the commands of the containers")
        if not is_deleting(each):
            await _reconcile(client, each)


async def _reconcile(client: Client, cluster: Manifest) -> None:
    metadata, spec = cluster["metadata"], cluster["spec"]
    await client.create(path("v1", metadata["namespace"], "services"), head_service(cluster))
    at = path("v1", metadata["namespace"], "pods")
    pods = [p for p in await client.every(at) if owner_uid(p) == metadata["uid"]]
    groups = [("headgroup", "head", 1, spec["headGroupSpec"]["template"])]
    groups += [
        (each["groupName"], "worker", each["replicas"], each["template"])
        for each in spec.get("workerGroupSpecs", ())
    ]
    for group, kind, count, template in groups:
        have = [p for p in pods if p["metadata"]["labels"]["ray.io/group"] == group]
        for _ in range(count - len(have)):
            await client.create(at, _pod(cluster, group, kind, template))
    await _say(client, cluster, pods)


def _pod(cluster: Manifest, group: str, kind: str, template: Manifest) -> Manifest:
    metadata = cluster["metadata"]
    made = copy.deepcopy(template)
    labels = {"ray.io/cluster": metadata["name"], "ray.io/group": group, "ray.io/node-type": kind}
    if kind == "worker":
        host = f"{metadata['name']}-head-svc.{metadata['namespace']}.svc.cluster.local"
        container = made["spec"]["containers"][0]
        container["env"].append({"name": "FQ_RAY_IP", "value": host})
        waits = {"name": "wait-gcs-ready", "command": ["/bin/bash", "-c", "--"], "args": [WAIT]}
        same = ("image", "env", "securityContext", "volumeMounts")
        waits |= {each: container[each] for each in same if each in container}
        made["spec"].setdefault("initContainers", []).append(waits)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{metadata['name']}-{group}-{kind}-",
            "labels": made["metadata"]["labels"] | labels,
            "ownerReferences": controller(cluster, API, "RayCluster"),
        },
        "spec": made["spec"],
    }


def head_service(cluster: Manifest) -> Manifest:
    """The Service by which workers find the head."""
    name = cluster["metadata"]["name"]
    container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    given = {
        port.get("name") or f"{port['containerPort']}-port": port["containerPort"]
        for port in container.get("ports", ())
    }
    ports = {**METRICS, **(given or DEFAULTS)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": f"{name}-head-svc",
            "ownerReferences": controller(cluster, API, "RayCluster"),
        },
        "spec": {
            "clusterIP": "None",
            "selector": {"ray.io/cluster": name, "ray.io/node-type": "head"},
            "ports": [{"name": each, "port": ports[each]} for each in sorted(ports)],
        },
    }


async def _say(client: Client, cluster: Manifest, pods: Sequence[Manifest]) -> None:
    metadata = cluster["metadata"]
    ready = [p for p in pods if is_true(p, "Ready")]
    workers = [p for p in ready if p["metadata"]["labels"]["ray.io/node-type"] == "worker"]
    status: Manifest = {"readyWorkerReplicas": len(workers)}
    if pods and len(ready) == len(pods):
        status["state"] = "ready"
    if status != cluster.get("status"):
        at = path(API, metadata["namespace"], "rayclusters", metadata["name"], "status")
        await client.patch(at, {"status": status})
