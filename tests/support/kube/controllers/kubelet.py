"""What a node would do, for clusters without one: our pods are Ready as they appear.

One that is told to go has ended at once; a pod that no Job keeps for its books is gone before that,
because it has no node.
"""

from tests.support.kube.controllers.client import Client
from tests.support.kube.controllers.objects import is_deleting, is_true, path, said

OURS = "app.kubernetes.io%2Fmanaged-by%3Detude"


async def kubelet(client: Client) -> None:
    """One look at every pod of ours."""
    for pod in await client.every(f"/api/v1/pods?labelSelector={OURS}"):
        is_over = pod.get("status", {}).get("phase") == "Failed"
        if is_over or (is_true(pod, "Ready") and not is_deleting(pod)):
            continue
        metadata = pod["metadata"]
        at = path("v1", metadata["namespace"], "pods", metadata["name"], "status")
        is_up = not is_deleting(pod)
        phase = "Running" if is_up else "Failed"
        status = {"phase": phase, "conditions": said(pod, Ready=(is_up, ""))}
        await client.patch(at, {"status": status})
