"""Volcano's scheduler: pods of a PodGroup get a node together, or none does.

Contract (https://volcano.sh/en/docs/podgroup, scheduling.volcano.sh/v1beta1): a pod whose
`schedulerName` is `volcano` joins the PodGroup that its annotation `scheduling.k8s.io/group-name`
names. Below `minMember` pods, or without room for so many, none is bound, and the group says
`Unschedulable` and why; once they are bound it says `Scheduled`, and the refusal stays True beside
it. Room is what annotation `test/room` of the group says, a number of pods.
"""

from tests.support.kube.controllers.client import Client, Manifest
from tests.support.kube.controllers.objects import is_deleting, path, said

API = "scheduling.volcano.sh/v1beta1"
GROUP = "scheduling.k8s.io/group-name"


async def volcano(client: Client) -> None:
    """One look at every PodGroup."""
    for group in await client.every(f"/apis/{API}/podgroups"):
        metadata = group["metadata"]
        pods = await client.every(path("v1", metadata["namespace"], "pods"))
        own = [
            pod
            for pod in pods
            if pod["spec"].get("schedulerName") == "volcano"
            and pod["metadata"].get("annotations", {}).get(GROUP) == metadata["name"]
            and not is_deleting(pod)
        ]
        await _schedule(client, group, own)


async def _schedule(client: Client, group: Manifest, pods: list[Manifest]) -> None:
    metadata, least = group["metadata"], group["spec"]["minMember"]
    room = int(metadata.get("annotations", {}).get("test/room", "0"))
    is_placed = least <= min(len(pods), room)
    if is_placed:
        for pod in (each for each in pods if not each["spec"].get("nodeName")):
            name = pod["metadata"]["name"]
            at = path("v1", metadata["namespace"], "pods", name, "binding")
            target = {"apiVersion": "v1", "kind": "Node", "name": "node"}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
            await client.create(at, {**binding, "target": target})
    status = {
        "phase": "Running" if is_placed else "Pending",
        "conditions": _conditions(group, "Scheduled" if is_placed else "Unschedulable"),
    }
    if status != group.get("status"):
        at = path(API, metadata["namespace"], "podgroups", metadata["name"])
        await client.patch(at, {"status": status})


def _conditions(group: Manifest, kind: str) -> list[Manifest]:
    """Its conditions with this one as the newest."""
    known = group.get("status", {}).get("conditions", [])
    newest = max(known, key=lambda each: each["lastTransitionTime"], default={"type": ""})
    if newest["type"] == kind:
        return list(known)
    others = [each for each in known if each["type"] != kind]
    return said({"status": {"conditions": others}}, **{kind: (True, "tasks")})
