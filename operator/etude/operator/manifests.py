"""Manifests: Kubernetes objects as dicts, their kinds, identity, owners and comparison."""

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from etude.common.api.kinds import ApiObject
from etude.common.api.meta import API_VERSION
from etude.common.api.schema import crd
from etude.operator import names

Manifest = dict[str, Any]
M = TypeVar("M", bound=ApiObject)


class ApiResource(NamedTuple):
    """API version and plural of a kind."""

    api_version: str
    plural: str


RESOURCES: Mapping[str, ApiResource] = {
    **{kind.name: ApiResource(API_VERSION, kind.plural) for kind in crd.KINDS},
    "Pod": ApiResource("v1", "pods"),
    "Service": ApiResource("v1", "services"),
    "ConfigMap": ApiResource("v1", "configmaps"),
    "StatefulSet": ApiResource("apps/v1", "statefulsets"),
    "Deployment": ApiResource("apps/v1", "deployments"),
    "Job": ApiResource("batch/v1", "jobs"),
    "PodDisruptionBudget": ApiResource("policy/v1", "poddisruptionbudgets"),
    "NetworkPolicy": ApiResource("networking.k8s.io/v1", "networkpolicies"),
    "Certificate": ApiResource("cert-manager.io/v1", "certificates"),
    "Event": ApiResource("events.k8s.io/v1", "events"),
    "Lease": ApiResource("coordination.k8s.io/v1", "leases"),
    "JobSet": ApiResource("jobset.x-k8s.io/v1alpha2", "jobsets"),
    "HTTPRoute": ApiResource("gateway.networking.k8s.io/v1", "httproutes"),
    "RayCluster": ApiResource("ray.io/v1", "rayclusters"),
    "PodGroup": ApiResource("scheduling.volcano.sh/v1beta1", "podgroups"),
    "Workload": ApiResource("kueue.x-k8s.io/v1beta2", "workloads"),
    "ResourceFlavor": ApiResource("kueue.x-k8s.io/v1beta2", "resourceflavors"),
    "WorkloadPriorityClass": ApiResource("kueue.x-k8s.io/v1beta2", "workloadpriorityclasses"),
    "PriorityClass": ApiResource("scheduling.k8s.io/v1", "priorityclasses"),
    "Sandbox": ApiResource("agents.x-k8s.io/v1beta1", "sandboxes"),
    "SandboxTemplate": ApiResource("extensions.agents.x-k8s.io/v1beta1", "sandboxtemplates"),
}


CLUSTER_SCOPED = ("ResourceFlavor", "WorkloadPriorityClass", "PriorityClass")
"""Cluster-scoped kinds of other projects, which the operator only reads."""

READ_ONLY = (*CLUSTER_SCOPED, "SandboxTemplate")
"""Kinds of other projects that users create, without the operator's labels."""

CREATE_ONLY = ("JobSet", "RayCluster", "Workload", "Sandbox")
"""Kinds that are created and deleted but never changed, since other controllers write to them."""

NEVER_DELETED = ("ConfigMap", "Certificate")
"""Cheap kinds that are garbage-collected with their owner: the operator may not delete them."""

IMMUTABLE = (*CREATE_ONLY, "Pod", "Job")
"""Kinds that are fixed once created: a different one replaces them."""

CREATED_BY_POST = (
    *IMMUTABLE,
    *("StatefulSet", "Deployment", "Service", "ConfigMap"),
    *("PodDisruptionBudget", "NetworkPolicy"),
)
"""Kinds that are created with POST and applied only for changes.

Without custom resources that change: the creator owns their defaults, and an apply that omits them
leaves null in place of a mapping, which their schemas reject.
"""

OWN_KINDS = tuple(kind.name for kind in crd.KINDS)
"""The operator's own kinds: users create them, the operator reconciles them."""


class Ref(NamedTuple):
    """The identity of an object."""

    kind: str
    namespace: str
    name: str


def ref(manifest: Manifest) -> Ref:
    """The identity of this object."""
    metadata = manifest["metadata"]
    return Ref(manifest["kind"], metadata.get("namespace", "default"), metadata["name"])


def uid(manifest: Manifest) -> str:
    """The uid that the API server assigned; empty before that."""
    text: str = manifest["metadata"].get("uid", "")
    return text


def resource_version(manifest: Manifest) -> int:
    """The object's version as a number; 0 before the API server assigned one."""
    return int(manifest["metadata"].get("resourceVersion", 0) or 0)


def labels(manifest: Manifest) -> Mapping[str, str]:
    """The object's labels."""
    found: Mapping[str, str] = manifest["metadata"].get("labels") or {}
    return found


def checkpoint_of(manifest: Manifest) -> str | None:
    """The checkpoint of a Job or its pod; an annotation, as labels are too short for some names."""
    annotations: Mapping[str, str] = manifest["metadata"].get("annotations") or {}
    return annotations.get(names.CHECKPOINT) or labels(manifest).get(names.CHECKPOINT)


def is_deleting(manifest: Manifest) -> bool:
    """Return true if the object is terminating."""
    return bool(manifest["metadata"].get("deletionTimestamp"))


def controller(manifest: Manifest) -> Mapping[str, Any]:
    """Owner reference of the object that controls this one; empty if there is none."""
    for owner in manifest["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            found: Mapping[str, Any] = owner
            return found
    return {}


def controller_uid(manifest: Manifest) -> str:
    """The uid of the object that controls this one; empty if there is none."""
    return str(controller(manifest).get("uid", ""))


def condition(manifest: Manifest, kind: str) -> Mapping[str, Any]:
    """One condition of the object's status; empty if it is missing."""
    for item in manifest.get("status", {}).get("conditions") or ():
        if item["type"] == kind:
            found: Mapping[str, Any] = item
            return found
    return {}


def is_true(manifest: Manifest, kind: str) -> bool:
    """Return true if this condition of the object is True."""
    return condition(manifest, kind).get("status") == "True"


def digest(manifest: Manifest) -> str:
    """Hash of a manifest, 16 hexadecimal digits."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stamp_digest(manifest: Manifest) -> Manifest:
    """The manifest with a digest of itself in an annotation."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), names.APPLIED_DIGEST: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


_ATOMIC = frozenset({"selector", "podSelector", "matchLabels", "nodeSelector"})
"""Maps that have one owner as a whole (k8s.io/api: mapType or structType atomic): an added key
changes what they select."""


def has_fields_of(live: object, desired: object, *, path: str = "") -> bool:
    """Return true if the live object has every field of the desired one.

    Defaults of the API server are ignored, quantities compared by value, lists of named items
    matched by name, selectors compared whole.
    """
    # Manifests are plain dicts; isinstance with Mapping would take half the time of a pass.
    if isinstance(desired, dict):
        return isinstance(live, dict) and _mapping_has_fields_of(live, desired, path)
    if isinstance(desired, list):
        return isinstance(live, list) and _list_has_items_of(live, desired, path)
    if ".resources." in path and isinstance(desired, str | int) and isinstance(live, str):
        return parse_quantity(live) == parse_quantity(str(desired))
    return live == desired


def _mapping_has_fields_of(live: Manifest, desired: Manifest, path: str) -> bool:
    for key, value in desired.items():
        if key in live:
            if not has_fields_of(live[key], value, path=f"{path}.{key}"):
                return False
            if key in _ATOMIC and live[key] != value:
                return False
        elif not _is_dropped(key, value):
            return False
    return True


def _is_dropped(key: str, value: object) -> bool:
    """Return true for a field that the API server drops; a volume is empty but for its type."""
    return value is None or (value in ([], {}) and key != "emptyDir")


def is_applied(live: Manifest, manifest: Manifest) -> bool:
    """Return true if the live object is the full result of this stamped manifest."""
    stamps = [
        m["metadata"].get("annotations", {}).get(names.APPLIED_DIGEST) for m in (live, manifest)
    ]
    return stamps[0] == stamps[1] and has_fields_of(live, manifest)


_MERGE_KEYS = ("name", "mountPath", "containerPort", "type", "uid")


def _list_has_items_of(live: list[Any], desired: list[Any], path: str) -> bool:
    key = next((k for k in _MERGE_KEYS if desired and all(_has(item, k) for item in desired)), None)
    if key is None:
        return len(live) == len(desired) and all(
            has_fields_of(theirs, ours, path=path)
            for theirs, ours in zip(live, desired, strict=True)
        )
    by_key = {item[key]: item for item in live if _has(item, key)}
    return all(
        item[key] in by_key and has_fields_of(by_key[item[key]], item, path=path)
        for item in desired
    )


def _has(item: object, key: str) -> bool:
    return isinstance(item, dict) and key in item


_QUANTITY = re.compile(r"^([0-9.]+(?:[eE][-+]?[0-9]+)?)(m|k|[KMGTP]i?|)$")
_SCALES = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000), "K": Decimal(1000)}
_SCALES |= {f"{unit}i": Decimal(1024) ** (i + 1) for i, unit in enumerate("KMGTP")}
_SCALES |= {unit: Decimal(1000) ** (i + 2) for i, unit in enumerate("MGTP")}


def parse_quantity(text: str) -> Decimal | str:
    """A Kubernetes quantity as a number; other text stays text."""
    match = _QUANTITY.match(text)
    return Decimal(match[1]) * _SCALES[match[2]] if match else text


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that turns one object into another; lists are replaced whole.

    Source: https://www.rfc-editor.org/rfc/rfc7396.
    """
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        known = before.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            inner = merge_patch(known, value)
            patch |= {key: inner} if inner else {}
        elif value != known:
            patch[key] = value
    return patch


def parse_object(model: type[M], manifest: Manifest | None) -> M | None:
    """Parse an object; None if there is none, or if it has fields that cannot be read.

    Its own pass reports those; an object that names it goes on without it.
    """
    if manifest is None:
        return None
    try:
        return model.parse_known_fields(manifest)
    except ValidationError:
        return None
