"""What a node would do, for clusters without one: our pods are Running and Ready as they appear."""

from tests.support.controllers.client import Client
from tests.support.controllers.objects import is_deleting, is_true, path, said

OURS = "app.kubernetes.io%2Fmanaged-by%3Detude"


async def kubelet(client: Client) -> None:
    """One look at every pod of ours. One that has no node is gone as soon as it is deleted."""
    for pod in await client.every(f"/api/v1/pods?labelSelector={OURS}"):
        if is_true(pod, "Ready") or is_deleting(pod):
            continue
        metadata = pod["metadata"]
        at = path("v1", metadata["namespace"], "pods", metadata["name"], "status")
        status = {"phase": "Running", "conditions": said(pod, Ready=(True, ""))}
        await client.patch(at, {"status": status})
