"""Services, ConfigMaps and StatefulSets, the same for every role."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from etude.common.api.kinds import EnvPool, EvalRun, PolicyRoute, RLRun
from etude.common.api.meta import API_VERSION
from etude.operator import names
from etude.operator.builders.pod import RolePod, pod_spec
from etude.operator.builders.strategic_merge import strategic_merge
from etude.operator.manifests import Manifest, stamp_digest

Owner = RLRun | EnvPool | PolicyRoute | EvalRun
"""An object with children."""

POD_GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
"""Annotation with which a pod joins a PodGroup of Volcano."""


class ReplicatedRole(NamedTuple):
    """A role of a run with its Service, replicas and pod template."""

    role: str
    service: str
    """Headless Service that names its pods."""
    replicas: int
    template: Manifest


def service(
    owner: Owner,
    name: str,
    labels: Mapping[str, str],
    ports: Mapping[str, int],
    *,
    is_headless: bool = True,
) -> Manifest:
    """A Service; a headless one has one name per pod, and no balancing in between."""
    # Peers connect during startup: an engine gets its weights before it is ready.
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True} if is_headless else {}
    spec = {
        **headless,
        "selector": dict(labels),
        "ports": [
            {"name": port, "port": number, "targetPort": number, "protocol": "TCP"}
            for port, number in ports.items()
        ],
    }
    return {**object_head(owner, "v1", "Service", name, labels), "spec": spec}


def config_map(
    owner: Owner, name: str, labels: Mapping[str, str], files: Mapping[str, object]
) -> Manifest:
    """A ConfigMap with JSON files."""
    data = {file: canonical_json(content) for file, content in files.items()}
    return {**object_head(owner, "v1", "ConfigMap", name, labels), "data": data}


def canonical_json(value: object) -> str:
    """Canonical JSON of a value."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def stateful_set(
    owner: Owner,
    name: str,
    labels: Mapping[str, str],
    pod: RolePod,
    *,
    replicas: int,
    attempt: int,
) -> Manifest:
    """A role as a StatefulSet that changes nothing on its own."""
    spec = {
        "serviceName": name,
        "replicas": replicas,
        "podManagementPolicy": "Parallel",
        # An update of the operator or of the spec restarts nothing by itself.
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": dict(labels)},
        "template": pod_template(labels, pod, attempt),
    }
    return {**object_head(owner, "apps/v1", "StatefulSet", name, labels), "spec": spec}


def rolling_set(
    owner: Owner, name: str, labels: Mapping[str, str], pod: RolePod, *, replicas: int
) -> Manifest:
    """A StatefulSet that replaces one pod after the other when its template changes."""
    manifest = stateful_set(owner, name, labels, pod, replicas=replicas, attempt=0)
    return {**manifest, "spec": {**manifest["spec"], "updateStrategy": {"type": "RollingUpdate"}}}


def deployment(
    owner: Owner, name: str, labels: Mapping[str, str], pod: RolePod, *, replicas: int | None = None
) -> Manifest:
    """A Deployment whose pods are replaced by ones that are ready.

    Args:
        owner: its owner.
        name: of it.
        labels: of it and of its pods.
        pod: its pods.
        replicas: their number; None for one of which there are never two.
    """
    surge = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    spec = {
        "replicas": 1 if replicas is None else replicas,
        "strategy": {"type": "Recreate"} if replicas is None else surge,
        "selector": {"matchLabels": dict(labels)},
        "template": pod_template(labels, pod, 0),
    }
    return {**object_head(owner, "apps/v1", "Deployment", name, labels), "spec": spec}


def disruption_budget(
    owner: Owner, name: str, labels: Mapping[str, str], limit: Mapping[str, int]
) -> Manifest:
    """A PodDisruptionBudget for pods with these labels."""
    spec = {**limit, "selector": {"matchLabels": dict(labels)}}
    return {**object_head(owner, "policy/v1", "PodDisruptionBudget", name, labels), "spec": spec}


def keep_selector(manifest: Manifest, live: Manifest | None) -> Manifest:
    """The manifest with the selector of the live StatefulSet, which is immutable.

    A pool outlives a run that is deleted alone, and its pods keep the run's label then.
    """
    if manifest["kind"] != "StatefulSet" or live is None:
        return manifest
    spec, selector = manifest["spec"], live["spec"]["selector"]
    if selector == spec["selector"]:
        return manifest
    metadata = spec["template"]["metadata"]
    chosen = {**metadata, "labels": {**metadata["labels"], **selector.get("matchLabels", {})}}
    template = {**spec["template"], "metadata": chosen}
    return stamp_digest({**manifest, "spec": {**spec, "selector": selector, "template": template}})


def pod_template(labels: Mapping[str, str], pod: RolePod, attempt: int) -> Manifest:
    """Pod template of a role."""
    overrides, group = pod.overrides, pod.placement.pod_group
    annotations = dict(overrides.annotations)
    if group is not None:
        annotations[POD_GROUP_ANNOTATION] = group
    metadata: Manifest = {"labels": {**overrides.labels, **labels, names.ATTEMPT: str(attempt)}}
    if annotations:
        metadata["annotations"] = annotations
    return strategic_merge({"metadata": metadata, "spec": pod_spec(pod)}, overrides.patch)


def object_head(
    owner: Owner, api_version: str, kind: str, name: str, labels: Mapping[str, str]
) -> Manifest:
    """Kind, name, labels and owner of a child."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.metadata.namespace,
            "labels": dict(labels),
            "ownerReferences": [owner_reference(owner)],
        },
    }


def owner_labels(owner: Owner) -> dict[str, str]:
    """Labels of a child that no role has: objects with a role's label are taken for its parts."""
    keys = {
        "RLRun": names.RUN,
        "EnvPool": names.POOL,
        "PolicyRoute": names.ROUTE,
        "EvalRun": names.EVALUATION,
    }
    return {names.MANAGED_BY: names.MANAGER, keys[owner.kind]: owner.metadata.name}


def owner_reference(owner: Owner) -> Manifest:
    """The controller owner reference of a child."""
    return {
        "apiVersion": API_VERSION,
        "kind": owner.kind,
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
