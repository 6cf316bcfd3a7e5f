"""What stand-ins say about objects."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

Manifest = dict[str, Any]


def path(api: str, namespace: str, plural: str, name: str = "", part: str = "") -> str:
    """`/apis/…` of namespaced objects."""
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    return "/".join(each for each in (root, "namespaces", namespace, plural, name, part) if each)


def controller(owner: Manifest, api: str, kind: str) -> list[Manifest]:
    """The owner reference of what a controller makes."""
    return [
        {
            "apiVersion": api,
            "kind": kind,
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def owner_uid(manifest: Manifest) -> str:
    for owner in manifest["metadata"].get("ownerReferences", ()):
        if owner.get("controller"):
            return str(owner["uid"])
    return ""


def is_deleting(manifest: Manifest) -> bool:
    return "deletionTimestamp" in manifest["metadata"]


def condition(manifest: Manifest, kind: str) -> Mapping[str, Any]:
    conditions = manifest.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] == kind), {})


def is_true(manifest: Manifest, kind: str) -> bool:
    return condition(manifest, kind).get("status") == "True"


def said(manifest: Manifest, **facts: tuple[bool, str]) -> list[Manifest]:
    """The conditions of an object with these set, each to a truth and a reason."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    known = {each["type"]: each for each in manifest.get("status", {}).get("conditions", ())}
    for kind, (holds, reason) in facts.items():
        status = "True" if holds else "False"
        if known.get(kind, {}).get("status") != status or known[kind]["reason"] != reason:
            known[kind] = {
                "type": kind,
                "status": status,
                "reason": reason,
                "message": f"{kind} is {status}",
                "lastTransitionTime": now,
            }
    return list(known.values())
