"""agent-sandbox's controller: one pod for every Sandbox that runs, and word of how it is.

Contract (https://agent-sandbox.sigs.k8s.io/docs, agents.x-k8s.io/v1beta1, release v1.0.7): the pod
has the Sandbox's name, is controlled by it and carries the labels of its template; one that is gone
is made again. Condition `Ready` is the pod's, and `Finished` is true once the pod is over. Who
deletes a Sandbox takes its pod along, by ownership: in the foreground before it, else after it.
"""

from tests.support.kube.controllers.client import Client, Manifest
from tests.support.kube.controllers.objects import controller, is_deleting, is_true, path, said

API = "agents.x-k8s.io/v1beta1"


async def agent_sandbox(client: Client) -> None:
    """One look at every Sandbox."""
    for each in await client.every(f"/apis/{API}/sandboxes"):
        if not is_deleting(each) and each["spec"].get("operatingMode") != "Suspended":
            await _reconcile(client, each)


async def _reconcile(client: Client, sandbox: Manifest) -> None:
    namespace, name = sandbox["metadata"]["namespace"], sandbox["metadata"]["name"]
    pod = await client.get(path("v1", namespace, "pods", name))
    if pod is None:
        await client.create(path("v1", namespace, "pods"), _pod(sandbox))
    phase = (pod or {}).get("status", {}).get("phase", "")
    is_ready = pod is not None and is_true(pod, "Ready") and not is_deleting(pod)
    conditions = said(
        sandbox,
        Ready=(is_ready, "DependenciesReady" if is_ready else "DependenciesNotReady"),
        Finished=(phase in {"Succeeded", "Failed"}, f"Pod{phase or 'Pending'}"),
    )
    if conditions != sandbox.get("status", {}).get("conditions"):
        at = path(API, namespace, "sandboxes", name, "status")
        await client.patch(at, {"status": {"conditions": conditions}})


def _pod(sandbox: Manifest) -> Manifest:
    template = sandbox["spec"]["podTemplate"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **template.get("metadata", {}),
            "name": sandbox["metadata"]["name"],
            "ownerReferences": controller(sandbox, API, "Sandbox"),
        },
        "spec": template["spec"],
    }
