"""What an account may do, what it did, and what it must never do."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override


class Right(NamedTuple):
    """One verb on one resource."""

    group: str
    resource: str
    verb: str

    @override
    def __str__(self) -> str:
        return f"{self.verb} {self.resource}.{self.group}".removesuffix(".")


def granted(roles: Iterable[Mapping[str, Any]]) -> set[Right]:
    """Every right of some roles."""
    return {
        Right(group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(log: Path) -> set[Right]:
    """Every right that the requests of an audit log needed."""
    return {right for event in events(log) for right in _of(event)}


def refused(log: Path) -> list[str]:
    """Requests of an audit log that were forbidden for want of a right."""
    return [
        f"{event['verb']} {event['requestURI']}"
        for event in events(log)
        if event.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
    ]


def events(log: Path) -> Iterator[Mapping[str, Any]]:
    """The requests about objects, each once; a line that is being written is not there yet."""
    whole, _, _ = log.read_text(encoding="utf-8").rpartition("\n")
    for line in whole.splitlines():
        event = json.loads(line)
        if "objectRef" in event and event["stage"] in {"ResponseComplete", "ResponseStarted"}:
            yield event


def _of(event: Mapping[str, Any]) -> Iterator[Right]:
    found = event["objectRef"]
    resource = "/".join(found[part] for part in ("resource", "subresource") if part in found)
    group = found.get("apiGroup", "")
    yield Right(group, resource, event["verb"])
    # Server-side apply of what is not there asks for the right to create it as well.
    if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == 201:
        yield Right(group, resource, "create")


CORE, LAB, SYSTEM = "/api/v1", "/api/v1/namespaces/forbidden", "/api/v1/namespaces/kube-system"
APPS, BATCH = "/apis/apps/v1", "/apis/batch/v1"
OURS = "/apis/etude.dev/v1alpha1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
FORBIDDEN: tuple[tuple[str, str], ...] = (
    *(("GET", f"{where}/secrets") for where in (CORE, LAB, SYSTEM)),
    *((verb, f"{LAB}/secrets/a") for verb in ("GET", "PUT", "PATCH", "DELETE")),
    ("POST", f"{LAB}/secrets"),
    ("DELETE", f"{LAB}/secrets"),
    *((verb, f"{LAB}/serviceaccounts/default") for verb in ("GET", "PATCH", "DELETE")),
    ("POST", f"{LAB}/serviceaccounts/default/token"),
    ("POST", f"{SYSTEM}/serviceaccounts/admin/token"),
    *(("POST", f"{LAB}/pods/a/{part}") for part in ("exec", "attach", "portforward", "eviction")),
    *(("GET", f"{LAB}/pods/a/{part}") for part in ("log", "proxy")),
    ("PATCH", f"{LAB}/pods/a/ephemeralcontainers"),
    ("PATCH", f"{LAB}/pods/a/status"),
    ("DELETE", f"{LAB}/pods"),
    ("PUT", f"{LAB}/pods/a"),
    ("DELETE", f"{LAB}/configmaps/a"),
    ("DELETE", f"{LAB}/configmaps"),
    ("GET", f"{LAB}/persistentvolumeclaims"),
    ("GET", f"{CORE}/persistentvolumes"),
    *((verb, f"{CORE}/nodes") for verb in ("GET", "DELETE")),
    ("PATCH", f"{CORE}/nodes/node-1/status"),
    ("POST", f"{CORE}/namespaces"),
    ("DELETE", LAB),
    ("PATCH", LAB),
    ("GET", f"{LAB}/endpoints"),
    ("POST", f"{LAB}/pods/a/binding"),
    ("PUT", f"{APPS}/namespaces/forbidden/deployments/a"),
    ("PUT", f"{APPS}/namespaces/forbidden/deployments/a/scale"),
    ("POST", f"{APPS}/namespaces/forbidden/daemonsets"),
    ("PUT", f"{APPS}/namespaces/forbidden/statefulsets/a/scale"),
    ("PUT", f"{APPS}/namespaces/forbidden/statefulsets/a"),
    ("POST", f"{BATCH}/namespaces/forbidden/cronjobs"),
    ("PUT", f"{BATCH}/namespaces/forbidden/jobs/a"),
    ("POST", f"{OURS}/namespaces/forbidden/rlruns"),
    *((verb, f"{OURS}/namespaces/forbidden/rlruns/a") for verb in ("PATCH", "PUT")),
    ("PUT", f"{OURS}/namespaces/forbidden/rlruns/a/status"),
    ("PUT", f"{OURS}/namespaces/forbidden/envpools/a"),
    ("DELETE", f"{OURS}/namespaces/forbidden/checkpoints"),
    ("POST", f"{RBAC}/clusterrolebindings"),
    ("PATCH", f"{RBAC}/clusterroles/cluster-admin"),
    ("POST", f"{RBAC}/namespaces/forbidden/rolebindings"),
    ("PATCH", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rlruns.etude.dev"),
    ("GET", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"),
    ("POST", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"),
    ("POST", "/apis/certificates.k8s.io/v1/certificatesigningrequests"),
    ("GET", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/a"),
    ("DELETE", "/apis/coordination.k8s.io/v1/namespaces/etude-system/leases/etude-operator"),
    ("GET", "/apis/events.k8s.io/v1/namespaces/forbidden/events"),
    ("POST", "/apis/scheduling.k8s.io/v1/priorityclasses"),
)
"""Requests that an operator of runs has no business with; each answers 403."""
