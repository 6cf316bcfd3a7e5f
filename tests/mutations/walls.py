"""Pods before Pod Security: every pod that something becomes, asked of a restricted namespace."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.mutations.api import Api

Manifest = dict[str, Any]


def pods(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod in manifests, with the object that it comes of."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            yield name, {"metadata": {}, "spec": spec}
        elif "template" in spec and "containers" in spec["template"].get("spec", {}):
            yield name, _with_claims(spec)


def _with_claims(spec: Manifest) -> Manifest:
    """A template with the volumes that a StatefulSet adds to each of its pods."""
    claims = [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates") or ()]
    inner = spec["template"]["spec"]
    volumes = [*(inner.get("volumes") or ()), *({"name": n, "emptyDir": {}} for n in claims)]
    return {**spec["template"], "spec": {**inner, "volumes": volumes}}


def refusals(api: Api, namespace: str, manifests: Iterable[Manifest]) -> Iterator[str]:
    """Why pods are not admitted there; each is asked for, and none is made."""
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    for name, template in pods(manifests):
        # What a cluster has or has not is no question of walls.
        spec = {
            key: value
            for key, value in template["spec"].items()
            if key not in {"serviceAccountName", "priorityClassName", "runtimeClassName"}
        }
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
        reply = api.call("POST", path, json.dumps(body))
        if not reply.is_good:
            yield f"{name}: {reply.message}"


def restricted(api: Api, namespace: str) -> None:
    """Make a namespace that enforces the restricted Pod Security standard."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"metadata": {"name": namespace, "labels": labels}}
    assert api.call("POST", "/api/v1/namespaces", json.dumps(body)).is_good
