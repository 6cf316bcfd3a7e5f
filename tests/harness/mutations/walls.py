"""Pods before Pod Security: each is asked of a namespace that enforces a level of it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.harness.mutations.api import Api

Manifest = dict[str, Any]
CLASSES: Mapping[str, tuple[str, Manifest]] = {
    "priorityClassName": (
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1},
    ),
    "runtimeClassName": (
        "/apis/node.k8s.io/v1/runtimeclasses",
        {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "runc"},
    ),
}
"""Objects of the cluster that pods name, by the field that names them."""


def pods(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod in manifests, with the object that it comes of."""
    for manifest in manifests:
        spec = manifest.get("spec", {})
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            yield name, {"metadata": {}, "spec": spec}
        elif "template" in spec and "containers" in spec["template"].get("spec", {}):
            template = spec["template"]
            yield name, {**template, "spec": {**template["spec"], "volumes": _volumes(spec)}}


def _volumes(spec: Manifest) -> list[Manifest]:
    """Those of a pod, and those that a StatefulSet makes claims for."""
    claims = [each["metadata"]["name"] for each in spec.get("volumeClaimTemplates") or ()]
    made = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims]
    return [*(spec["template"]["spec"].get("volumes") or ()), *made]


def provide(api: Api, namespace: str, manifests: Iterable[Manifest]) -> None:
    """Make the accounts and classes that pods name, as whoever installs the chart has them."""
    for _, template in pods(manifests):
        spec = template["spec"]
        account = spec.get("serviceAccountName", "default")
        _made(api, f"/api/v1/namespaces/{namespace}/serviceaccounts", {}, account)
        for field, (path, body) in CLASSES.items():
            if not spec.get(field, "system-").startswith("system-"):
                _made(api, path, body, spec[field])


def _made(api: Api, path: str, body: Manifest, name: str) -> None:
    reply = api.call("POST", path, json.dumps({**body, "metadata": {"name": name}}))
    assert reply.is_good or reply.status == 409, reply.message


def refusals(api: Api, namespace: str, manifests: Iterable[Manifest]) -> Iterator[str]:
    """Why pods are not admitted there; each is asked for as a whole, and none is made."""
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict"
    for name, template in pods(manifests):
        given = template.get("metadata") or {}
        metadata = {"name": "probe", **{k: given[k] for k in MARKS if k in given}}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        reply = api.call("POST", path, json.dumps(body))
        if not reply.is_good:
            yield f"{name}: {reply.message}"


MARKS = ("labels", "annotations")


def make_namespace(api: Api, name: str, level: str) -> None:
    """Make a namespace that enforces a level of the Pod Security standards."""
    labels = {"pod-security.kubernetes.io/enforce": level}
    body = {"metadata": {"name": name, "labels": labels}}
    assert api.call("POST", "/api/v1/namespaces", json.dumps(body)).is_good
