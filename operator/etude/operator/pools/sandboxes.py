"""Nodes that are Sandboxes of agent-sandbox: whose name they have, and whose state."""

from collections.abc import Collection, Iterator, Mapping

from etude.common.api.backend import Backend
from etude.common.api.kinds import EnvPool
from etude.common.api.podtemplate import (
    directives,
    is_reserved,
    is_reserved_label,
    leaks,
    variables,
)
from etude.operator import integrations, names
from etude.operator.cluster.api import Cluster
from etude.operator.conditions import Fact, no
from etude.operator.desired.runs import Platform
from etude.operator.manifests import Manifest, Ref, controller_uid, is_deleting, labels, ref, uid
from etude.operator.reasons import Reason

ACCEPTED = "Accepted"
FIELD = "spec.sandboxTemplateRef"
LOOK_AGAIN_S = 10.0
"""What a pool waits for is made by others, and no event of it names the pool."""


def problem(
    pool: EnvPool, platform: Platform, *, served: Collection[str], template: Manifest | None
) -> Fact | None:
    """Why there can be no Sandboxes for a pool that asks for them.

    Args:
        pool: that may ask.
        platform: what the operator was installed with.
        served: kinds of other projects that the pool asks for and that can be used.
        template: the SandboxTemplate that it names.
    """
    if pool.spec.backend is not Backend.AGENT_SANDBOX:
        return None
    if platform.has_shared_files:
        message = "spec.backend: there are no Sandboxes on one machine; remove it"
        return no(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    for need in integrations.pool_needs(pool):
        missing = integrations.problem(need, platform.integrations, served)
        if missing is not None:
            return missing
    reference = pool.spec.sandbox_template_ref
    name = reference.name if reference is not None else ""
    if template is None:
        message = f"{FIELD}: no SandboxTemplate {name} in this namespace: create it"
        return no(ACCEPTED, Reason.SANDBOX_TEMPLATE_NOT_FOUND, message)
    for words in _wrong(template["spec"].get("podTemplate", {})):
        message = f"{FIELD}: SandboxTemplate {name}: spec.podTemplate.{words}; remove it"
        return no(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    return None


def is_awaited(problem: Fact | None) -> bool:
    """Whether a problem ends by itself once somebody makes something."""
    return problem is not None and (
        integrations.is_missing(problem) or problem.reason == Reason.SANDBOX_TEMPLATE_NOT_FOUND
    )


def _wrong(template: Mapping[str, Manifest]) -> Iterator[str]:
    """What would take from a node what the operator gives it, or let it out of its walls."""
    for key in template.get("metadata", {}).get("labels") or ():
        if is_reserved_label(key):
            yield f"metadata.labels: {key} is the operator's"
    spec = template.get("spec", {})
    for words in (*directives(spec), *leaks(spec)):
        yield f"spec.{words}"
    for name in variables(spec, names.NODE):
        if is_reserved(name):
            yield f"spec.containers: {name} is set by the operator"


def nodes(cluster: Cluster, pool: EnvPool, held: Mapping[Ref, Manifest]) -> Iterator[Manifest]:
    """Every Sandbox of a pool, with the state of its pod; and pods whose Sandbox went first.

    Those too run until they are gone, and hold their name: to overlook them is to have more nodes
    than wanted.

    Args:
        cluster: what is known.
        pool: whose they are.
        held: what the pool controls.
    """
    sandboxes = [m for m in held.values() if m["kind"] == "Sandbox"]
    for each in sandboxes:
        yield {**each, "status": _state(cluster, each)}
    known = {uid(each) for each in sandboxes}
    ours = {names.POOL: pool.metadata.name, names.ROLE: names.NODE}.items()
    for pod in cluster.every("Pod"):
        is_ours = ours <= labels(pod).items() and ref(pod).namespace == pool.metadata.namespace
        if is_ours and is_deleting(pod) and controller_uid(pod) not in known:
            yield pod


def _state(cluster: Cluster, sandbox: Manifest) -> Manifest:
    """The status of its pod; of two, of the one that stays."""
    pods = [each for each in cluster.owned(uid(sandbox)) if each["kind"] == "Pod"]
    pods.sort(key=is_deleting)
    found: Manifest = pods[0].get("status", {}) if pods else {}
    return found
