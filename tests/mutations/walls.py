"""Pods before Pod Security: every pod that something becomes, asked of a restricted namespace."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.mutations.api import Api

Manifest = dict[str, Any]
ELSEWHERE = {"serviceAccountName", "priorityClassName", "runtimeClassName", "resourceClaims"}


def pods(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod in manifests, with the object that it comes of."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            yield name, {"metadata": {}, "spec": spec}
        elif "template" in spec and "containers" in spec["template"].get("spec", {}):
            yield name, spec["template"]


def _askable(spec: Manifest) -> Manifest:
    """A pod's spec without what a cluster has or has not, which is no question of walls.

    Volumes that a StatefulSet or the writer of a value adds elsewhere are empty folders.
    """
    kept = {key: value for key, value in spec.items() if key not in ELSEWHERE}
    volumes = list(kept.get("volumes") or ())
    named = {each["name"] for each in volumes}
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts") or ()}
    volumes += [{"name": name, "emptyDir": {}} for name in sorted(mounted - named)]
    for kind in ("initContainers", "containers"):
        kept[kind] = [_unclaimed(each) for each in spec.get(kind) or ()]
    return {**kept, "volumes": volumes}


def _unclaimed(container: Manifest) -> Manifest:
    resources = {k: v for k, v in (container.get("resources") or {}).items() if k != "claims"}
    return {**container, "resources": resources}


def refusals(api: Api, namespace: str, manifests: Iterable[Manifest]) -> Iterator[str]:
    """Why pods are not admitted there; each is asked for, and none is made."""
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    for name, template in pods(manifests):
        spec = _askable(template["spec"])
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
        reply = api.call("POST", path, json.dumps(body))
        if not reply.is_good:
            yield f"{name}: {reply.message}"


def restricted(api: Api, namespace: str) -> None:
    """Make a namespace that enforces the restricted Pod Security standard."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"metadata": {"name": namespace, "labels": labels}}
    assert api.call("POST", "/api/v1/namespaces", json.dumps(body)).is_good
