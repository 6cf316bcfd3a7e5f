"""Token review: pure decisions on certificate requests from a TokenReview."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from etude.common.tls import identity as identities
from etude.common.tls.identity import Identity
from etude.operator.manifests import Manifest

ROLES = frozenset(
    {
        *(identities.TRAINER, identities.INFERENCE, identities.REWARDS),
        *(identities.BROKER, identities.NODE, identities.EDGE, identities.EVALUATOR),
        *(identities.GATEWAY, identities.FEEDBACK, identities.STABLE, identities.CANARY),
    }
)
_ACCOUNT = "system:serviceaccount:"
POD = "authentication.kubernetes.io/pod-name"
POD_UID = "authentication.kubernetes.io/pod-uid"
"""Extra fields of a reviewed token that is bound to a pod."""


class NodePools(NamedTuple):
    """Pools whose hosts are privileged pods of a namespace of their own."""

    namespace: str
    pools: frozenset[str]
    """NAMESPACE/NAME of each."""


NO_NODES = NodePools("", frozenset())


def review_manifest(token: str, identity: Identity) -> Manifest:
    """The TokenReview to send: a token is valid only for the identity that is its audience."""
    return {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [identity.uri]},
    }


def identity_problem(identity: Identity, *, domain: str) -> str:
    """The reason why no token gets an identity; empty if one may."""
    if identity.domain != domain:
        return f"{identity.domain} is not the trust domain {domain}"
    is_known = identity.role in {*ROLES, identities.OPERATOR}
    return "" if is_known else f"no pod has the role {identity.role!r}"


def bound_pod(reviewed: Mapping[str, Any]) -> str:
    """Name of the pod that a token is bound to; empty for an unbound one."""
    extra = (reviewed.get("user") or {}).get("extra") or {}
    name, uid = extra.get(POD) or (), extra.get(POD_UID) or ()
    return str(name[0]) if name and uid else ""


def rejection_reason(
    reviewed: Mapping[str, Any],
    identity: Identity,
    *,
    domain: str,
    operator: str,
    nodes: NodePools = NO_NODES,
) -> str:
    """The reason why a token does not get an identity; empty if it does.

    Args:
        reviewed: status of the TokenReview.
        identity: the requested one.
        domain: the trust domain of the issuer.
        operator: the operator's account, NAMESPACE:NAME.
        nodes: pools whose hosts live in another namespace.
    """
    why = identity_problem(identity, domain=domain)
    if why:
        return why
    if not reviewed.get("authenticated") or identity.uri not in (reviewed.get("audiences") or ()):
        return "the token is not valid in this cluster, or has another audience"
    user = str((reviewed.get("user") or {}).get("username", ""))
    if not user.startswith(_ACCOUNT):
        return "the token is not a ServiceAccount's"
    if not bound_pod(reviewed):
        return "the token is not bound to a pod, and would outlive every pod"
    account = user.removeprefix(_ACCOUNT)
    if identity.role == identities.OPERATOR:
        home = operator.partition(":")[0]
        is_part = identity.run or identity.pool or identity.route
        is_it = not is_part and identity.namespace == home
        return "" if account == operator and is_it else "only the operator's account may have it"
    return _namespace_problem(account.partition(":")[0], identity, nodes)


def _namespace_problem(namespace: str, identity: Identity, nodes: NodePools) -> str:
    if nodes.namespace and namespace == nodes.namespace:
        is_host = identity.role == identities.NODE and not (identity.run or identity.route)
        if is_host and f"{identity.namespace}/{identity.pool}" in nodes.pools:
            return ""
        return f"namespace {namespace} is for the hosts of nodes.pools alone"
    if namespace != identity.namespace:
        return f"an account of namespace {namespace} has no identity in {identity.namespace}"
    return ""
