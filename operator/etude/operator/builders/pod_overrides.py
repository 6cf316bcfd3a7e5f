"""Pod overrides: settings of a run's spec for the pods of a role."""

from collections.abc import Iterator, Mapping

from etude.common.api.kinds import RLRun
from etude.common.api.run.pod_template import (
    PodTemplate,
    directive_errors,
    duplicate_errors,
    host_access_errors,
    is_reserved,
    shape_errors,
    variable_names,
)
from etude.common.api.run.role_spec import RoleSpec
from etude.operator import names
from etude.operator.builders.pod import PodAffinity
from etude.operator.manifests import Manifest

SAVING_MARGIN_S = 30
"""Seconds that a terminating trainer has in addition to its checkpoint time-out."""


def pod_classes(run: RLRun, spec: RoleSpec) -> dict[str, str]:
    """PriorityClass and RuntimeClass of a role's pods; the role's own before the run's."""
    priority = spec.priority_class_name or run.spec.scheduling.priority_class_name
    return named_classes(priority, spec.runtime_class_name)


def named_classes(priority: str | None, runtime: str | None) -> dict[str, str]:
    """PriorityClass and RuntimeClass, by the fields of a pod's spec."""
    given = {"priorityClassName": priority, "runtimeClassName": runtime}
    return {name: value for name, value in given.items() if value is not None}


def pod_affinity(run: RLRun, labels: Mapping[str, str]) -> PodAffinity | None:
    """Affinity among the pods with these labels, by spec.scheduling.topology."""
    topology = run.spec.scheduling.topology
    if topology is None:
        return None
    key = topology.required or topology.preferred or ""
    return PodAffinity(labels, key, is_required=topology.required is not None)


def override_problems(spec: RoleSpec, container: str, at: str) -> Iterator[str]:
    """Settings of a role that would override fields of the operator, each with a suggested fix.

    Args:
        spec: of the role.
        container: name of its container.
        at: path of the role.
    """
    for item in spec.env:
        if is_reserved(item.name):
            yield f"{at}.env: {item.name} is set by the operator; remove it"
    patch, where = spec.pod_template.spec, f"{at}.podTemplate.spec"
    for message in shape_errors(patch, container):
        yield f"{where}.{message}"
    for message in (
        *directive_errors(patch),
        *host_access_errors(patch),
        *duplicate_errors(patch),
    ):
        yield f"{where}.{message}; remove it"
    for name in variable_names(patch, container):
        if is_reserved(name):
            yield f"{where}.containers: {name} is set by the operator; remove it"


def template_patch(given: PodTemplate) -> Manifest:
    """The podTemplate of a role as a strategic merge patch."""
    metadata = {"labels": given.labels, "annotations": given.annotations}
    found: Manifest = {"metadata": {name: part for name, part in metadata.items() if part}}
    return found | ({"spec": _both_accounts(given.spec)} if given.spec else {})


def _both_accounts(spec: Manifest) -> Manifest:
    """Set the service account by its deprecated field too.

    The API server fills in each of the two from the other. One that the operator does not own would
    keep the account after the podTemplate no longer names it.
    """
    account = spec.get("serviceAccountName") or spec.get("serviceAccount")
    return spec | {"serviceAccountName": account, "serviceAccount": account} if account else spec


def termination_grace_s(run: RLRun, role: str, spec: RoleSpec) -> int:
    """Termination grace period: a terminating trainer saves first, which a drain must allow."""
    given = spec.termination_grace_period_seconds
    if role == names.TRAINER and given is None:
        return run.spec.checkpointing.timeout_seconds + SAVING_MARGIN_S
    return spec.grace_s
