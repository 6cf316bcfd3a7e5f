"""What lies in a namespace, and what of it must be the same after a change and its undoing."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.harness.mutations.api import Api

KINDS = (
    *("StatefulSet", "Deployment", "Service", "ConfigMap", "PodDisruptionBudget"),
    *("NetworkPolicy", "Job", "Pod", "EnvPool", "Checkpoint"),
)
OURS = ("app.kubernetes.io/managed-by", "etude")
VOLATILE = {
    *("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "status"),
    *("clusterIP", "clusterIPs", "nodeName", "etude.dev/applied", "time", "lastTransitionTime"),
    *("controller-revision-hash", "observedGeneration", "selfLink", "ownerReferences"),
    *("batch.kubernetes.io/controller-uid", "controller-uid"),
}

_EMPTY: tuple[list[Any] | None, ...] = ([], None)
"""What an API server leaves of a list without entries."""

Manifest = dict[str, Any]


def children(api: Api, namespace: str) -> dict[tuple[str, str], Manifest]:
    """Everything of ours in a namespace that is not on its way out."""
    return {
        (kind, each["metadata"]["name"]): each
        for kind in KINDS
        for each in api.listed(kind, namespace)
        if _is_ours(each) and not each["metadata"].get("deletionTimestamp")
    }


def _is_ours(manifest: Manifest) -> bool:
    labels: Mapping[str, str] = manifest["metadata"].get("labels") or {}
    return labels.get(OURS[0]) == OURS[1]


def essence(found: Mapping[tuple[str, str], Manifest]) -> dict[str, Any]:
    """The objects without what differs between two that are the same."""
    return {f"{kind}/{name}": _without(each) for (kind, name), each in sorted(found.items())}


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without(each) for key, each in value.items() if key not in VOLATILE}
        if "run.json" in kept:
            kept["run.json"] = _without(json.loads(kept["run.json"]))
        if "pool.json" in kept:
            kept["pool.json"] = _without(json.loads(kept["pool.json"]))
        return kept
    return [_without(each) for each in value] if isinstance(value, list) else value


def conditions(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition."""
    found = manifest.get("status", {}).get("conditions") or ()
    return {each["type"]: (each["status"], each["reason"]) for each in found}


def unlike(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Where two values differ, by path; a list that lost its last entry may be gone, too."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from unlike(before.get(key), after.get(key), f"{path}.{key}")
    elif before != after and not (before in _EMPTY and after in _EMPTY):
        yield f"{path}: {str(before)[:200]} is now {str(after)[:200]}"
