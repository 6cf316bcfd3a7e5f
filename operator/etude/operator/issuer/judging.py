"""Whether whoever shows a token may have a certificate: pure decisions on a TokenReview."""

from collections.abc import Mapping
from typing import Any

from etude.common.tls import identity as identities
from etude.common.tls.identity import Identity
from etude.operator.manifests import Manifest

ROLES = frozenset(
    {
        *(identities.TRAINER, identities.INFERENCE, identities.REWARDS),
        *(identities.BROKER, identities.NODE, identities.EDGE),
    }
)
_ACCOUNT = "system:serviceaccount:"
POD = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"
"""What the API server says beside the account of a token that is bound to a pod."""


def review(token: str, identity: Identity) -> Manifest:
    """What to ask the API server: a token is good for the one identity that is its audience."""
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [identity.uri]},
    }


def impossible(identity: Identity, *, domain: str) -> str:
    """Why nobody at all gets an identity, whatever token they have; empty if somebody may."""
    if identity.domain != domain:
        return f"{identity.domain} is not the trust domain {domain}"
    return "" if identity.role in {*ROLES, identities.OPERATOR} else "nobody has that role"


def pod(reviewed: Mapping[str, Any]) -> str:
    """Name of the pod that a token is bound to; empty for one that outlives every pod."""
    extra = (reviewed.get("user") or {}).get("extra") or {}
    name, uid = extra.get(POD) or (), extra.get(POD_UID) or ()
    return str(name[0]) if name and uid else ""


def refusal(reviewed: Mapping[str, Any], identity: Identity, *, domain: str, operator: str) -> str:
    """Why an identity is not given to whoever showed the token; empty if it is.

    Args:
        reviewed: status of the TokenReview.
        identity: what is asked for.
        domain: the trust domain that is signed for.
        operator: the operator's account, NAMESPACE:NAME.
    """
    why = impossible(identity, domain=domain)
    if why:
        return why
    if not reviewed.get("authenticated") or identity.uri not in (reviewed.get("audiences") or ()):
        return "the token is not one of this cluster's, or is for something else"
    user = str((reviewed.get("user") or {}).get("username", ""))
    if not user.startswith(_ACCOUNT):
        return "the token is not a ServiceAccount's"
    if not pod(reviewed):
        return "the token is bound to no pod: it would be good for longer than any"
    account = user.removeprefix(_ACCOUNT)
    if identity.role == identities.OPERATOR:
        home = operator.partition(":")[0]
        is_it = not identity.run and not identity.pool and identity.namespace == home
        return "" if account == operator and is_it else "only the operator's account is that"
    return _of_part(account.partition(":")[0], identity)


def _of_part(namespace: str, identity: Identity) -> str:
    if namespace != identity.namespace:
        return f"an account of namespace {namespace} is nobody in {identity.namespace}"
    return ""
