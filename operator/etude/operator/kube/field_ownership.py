"""Field ownership: the managers of an object's fields (managedFields)."""

from collections.abc import Mapping, Sequence
from typing import Any

from etude.operator.manifests import Manifest


def take_over_fields(managed: Sequence[Manifest], manager: str) -> list[Manifest] | None:
    """The entries with the fields of a manager's create moved to its apply.

    A create is a separate owner: later applies could not remove its fields. None if the manager
    has no create entry.

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
