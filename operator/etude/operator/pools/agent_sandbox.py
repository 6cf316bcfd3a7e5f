"""Hosts that are Sandboxes of agent-sandbox: their preconditions and their pods' state."""

from collections.abc import Collection, Iterator, Mapping

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.backend import Backend
from etude.common.api.run.pod_template import (
    directive_errors,
    host_access_errors,
    is_reserved,
    is_reserved_label,
    variable_names,
)
from etude.operator import names
from etude.operator.builders.platform import Platform
from etude.operator.conditions import ConditionFact, false_condition
from etude.operator.integrations import apis
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest, Ref, controller_uid, is_deleting, labels, ref, uid
from etude.operator.reasons import Reason

ACCEPTED = "Accepted"
FIELD = "spec.sandboxTemplateRef"
RECHECK_S = 10.0
"""Time between two checks for objects of others, whose events do not name the pool."""


def sandbox_problem(
    pool: EnvPool, platform: Platform, *, served: Collection[str], template: Manifest | None
) -> ConditionFact | None:
    """The problem of a pool that asks for Sandboxes; None where they can be created.

    Args:
        pool: the pool.
        platform: configuration of the operator.
        served: served kinds of other projects that the pool needs.
        template: the SandboxTemplate that it names.
    """
    if pool.spec.backend is not Backend.AGENT_SANDBOX:
        return None
    if platform.has_shared_files:
        message = "spec.backend: the local runtime has no Sandboxes: remove the field"
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    for need in apis.pool_needs(pool):
        missing = apis.need_problem(need, platform.integrations, served)
        if missing is not None:
            return missing
    reference = pool.spec.sandbox_template_ref
    name = reference.name if reference is not None else ""
    if template is None:
        message = f"{FIELD}: no SandboxTemplate {name} in this namespace: create it"
        return false_condition(ACCEPTED, Reason.SANDBOX_TEMPLATE_NOT_FOUND, message)
    for words in _forbidden_fields(template["spec"].get("podTemplate", {})):
        message = f"{FIELD}: SandboxTemplate {name}: spec.podTemplate.{words}; remove it"
        return false_condition(ACCEPTED, Reason.INVALID_PARAMETERS, message)
    return None


def is_waiting(problem: ConditionFact | None) -> bool:
    """The problem ends once the missing API or object is created."""
    return problem is not None and (
        apis.is_api_missing(problem) or problem.reason == Reason.SANDBOX_TEMPLATE_NOT_FOUND
    )


def _forbidden_fields(template: Mapping[str, Manifest]) -> Iterator[str]:
    """Fields that override the operator's own or weaken the isolation of a host."""
    for key in template.get("metadata", {}).get("labels") or ():
        if is_reserved_label(key):
            yield f"metadata.labels: {key} is reserved for the operator"
    spec = template.get("spec", {})
    for words in (*directive_errors(spec), *host_access_errors(spec)):
        yield f"spec.{words}"
    for name in variable_names(spec, names.HOST):
        if is_reserved(name):
            yield f"spec.containers: {name} is set by the operator"


def sandbox_hosts(
    cluster: Cluster, pool: EnvPool, held: Mapping[Ref, Manifest]
) -> Iterator[Manifest]:
    """Every Sandbox of a pool with the status of its pod, and pods whose Sandbox is gone.

    Such pods run and hold their name until they are gone: without them there would be more hosts
    than wanted.

    Args:
        cluster: the cluster's caches.
        pool: the pool.
        held: objects that the pool controls.
    """
    sandboxes = [m for m in held.values() if m["kind"] == "Sandbox"]
    for each in sandboxes:
        yield {**each, "status": _pod_status(cluster, each)}
    known = {uid(each) for each in sandboxes}
    ours = {names.POOL: pool.metadata.name, names.ROLE: names.HOST}.items()
    for pod in cluster.list_objects("Pod"):
        is_ours = ours <= labels(pod).items() and ref(pod).namespace == pool.metadata.namespace
        if is_ours and is_deleting(pod) and controller_uid(pod) not in known:
            yield pod


def _pod_status(cluster: Cluster, sandbox: Manifest) -> Manifest:
    """The status of the Sandbox's pod; of two, of the one that is not terminating."""
    pods = [each for each in cluster.list_owned(uid(sandbox)) if each["kind"] == "Pod"]
    pods.sort(key=is_deleting)
    found: Manifest = pods[0].get("status", {}) if pods else {}
    return found
