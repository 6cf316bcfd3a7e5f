"""Whose the fields of an object are, as the API server writes it down (managedFields)."""

from collections.abc import Mapping, Sequence
from typing import Any

from etude.operator.manifests import Manifest


def taken_over(managed: Sequence[Manifest], manager: str) -> list[Manifest] | None:
    """The entries in which whoever applies also owns what was created under the same name.

    A create leaves an owner that no later apply can speak for: a field that is not wanted any more
    would stay, as the creator's. None where a manager owns nothing of that kind.

    Source: https://pkg.go.dev/k8s.io/client-go/util/csaupgrade, which does it for kubectl.
    """
    created = [entry for entry in managed if _is_by(entry, manager, "Update")]
    if not created:
        return None
    applied = [entry for entry in managed if _is_by(entry, manager, "Apply")]
    fields: Manifest = {}
    for entry in (*applied, *created):
        fields = _union(fields, entry.get("fieldsV1") or {})
    ours = {**(*applied, *created)[0], "operation": "Apply", "fieldsV1": fields}
    others = [entry for entry in managed if entry not in created and entry not in applied]
    return [*others, ours]


def _is_by(entry: Mapping[str, Any], manager: str, operation: str) -> bool:
    who = (entry.get("manager"), entry.get("operation"), entry.get("subresource", ""))
    return who == (manager, operation, "")


def _union(one: Mapping[str, Any], other: Mapping[str, Any]) -> Manifest:
    """The fields of both sets; a set is a tree of names, a leaf an empty one."""
    shared = {key: _union(one[key], other[key]) for key in one.keys() & other.keys()}
    return {**one, **other, **shared}
