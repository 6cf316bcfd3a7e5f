"""Who gets which certificate."""

from typing import Any

import pytest

from etude.common.tls.identity import Identity
from etude.operator.issuer.token_review import NodePools, rejection_reason, review_manifest

URI = "spiffe://etude.dev/ns/lab/run/demo/role/trainer"
OPERATOR = "spiffe://etude.dev/ns/etude-system/role/operator"


def reviewed(user: str = "system:serviceaccount:lab:default", uri: str = URI) -> dict[str, Any]:
    bound = {
        "authentication.kubernetes.io/pod-name": ["demo-trainer-0"],
        "authentication.kubernetes.io/pod-uid": ["1f3"],
    }
    known = {"username": user, "extra": bound}
    return {"authenticated": True, "audiences": [uri], "user": known}


def unbound() -> dict[str, Any]:
    """As of `kubectl create token --duration 8760h`: no pod's end is its end."""
    found = reviewed()
    del found["user"]["extra"]["authentication.kubernetes.io/pod-uid"]
    return found


def judged(status: dict[str, Any], uri: str = URI) -> str:
    return rejection_reason(
        status, Identity.parse(uri), domain="etude.dev", operator="etude-system:etude-operator"
    )


def test_a_pod_of_the_namespace_is_who_its_token_was_made_for() -> None:
    assert judged(reviewed()) == ""


def test_a_token_is_reviewed_for_the_one_identity_that_is_asked_for() -> None:
    assert review_manifest("t", Identity.parse(URI))["spec"] == {"token": "t", "audiences": [URI]}


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({}, "not valid in this cluster"),
        ({"authenticated": False, "error": "expired"}, "not valid in this cluster"),
        ({**reviewed(), "audiences": []}, "another audience"),
        (reviewed(uri=URI.replace("trainer", "rewards")), "another audience"),
        (reviewed("system:serviceaccount:other:default"), "no identity in lab"),
        (reviewed("system:serviceaccount:lab2:default"), "no identity in lab"),
        (reviewed("kubernetes-admin"), "not a ServiceAccount's"),
        (reviewed("system:node:lab"), "not a ServiceAccount's"),
        (unbound(), "not bound to a pod"),
    ],
)
def test_everybody_else_is_refused(status: dict[str, Any], why: str) -> None:
    assert why in judged(status)


def test_another_domain_is_not_signed_for() -> None:
    uri = URI.replace("etude.dev", "etude.example")
    assert "trust domain" in judged(reviewed(uri=uri), uri)


@pytest.mark.parametrize(
    ("account", "uri", "is_given"),
    [
        ("etude-system:etude-operator", OPERATOR, True),
        ("etude-system:default", OPERATOR, False),
        ("etude-system:etude-operator", OPERATOR.replace("etude-system", "lab"), False),
        ("lab:default", "spiffe://etude.dev/ns/lab/role/operator", False),
        ("lab:etude-operator", "spiffe://etude.dev/ns/lab/role/operator", False),
        ("etude-system:etude-operator", "spiffe://etude.dev/ns/x/run/r/role/operator", False),
    ],
)
def test_the_operator_is_one_account_and_no_other(account: str, uri: str, is_given: Any) -> None:
    words = judged(reviewed(f"system:serviceaccount:{account}", uri), uri)
    assert (words == "") is is_given


@pytest.mark.parametrize("path", ["", "/role/issuer", "/run/r/role/janitor"])
def test_nobody_is_a_whole_namespace_or_has_a_role_that_there_is_not(path: str) -> None:
    uri = f"spiffe://etude.dev/ns/lab{path}"
    assert judged(reviewed(uri=uri), uri) == f"no pod has the role {Identity.parse(uri).role!r}"


@pytest.mark.parametrize(
    ("path", "is_given"),
    [
        ("ns/lab/pool/machines/role/node", True),
        ("ns/lab/pool/others/role/node", False),
        ("ns/other/pool/machines/role/node", False),
        ("ns/lab/pool/machines/role/broker", False),
        ("ns/lab/run/demo/pool/machines/role/node", False),
        ("ns/vms/pool/machines/role/node", False),
    ],
)
def test_the_nodes_namespace_gets_the_identities_of_its_pools_hosts_alone(
    path: str, *, is_given: bool
) -> None:
    uri = f"spiffe://etude.dev/{path}"
    why = rejection_reason(
        reviewed("system:serviceaccount:vms:default", uri),
        Identity.parse(uri),
        domain="etude.dev",
        operator="etude-system:etude-operator",
        nodes=NodePools("vms", frozenset({"lab/machines"})),
    )
    assert (not why) is is_given
