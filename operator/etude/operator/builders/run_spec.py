"""Spec of a run as its children need it: roles, pod counts, pool names, labels."""

from etude.common.api.kinds import RLRun
from etude.common.api.run.role_spec import RoleSpec
from etude.common.api.run.roles import EnvironmentRole
from etude.common.api.run.spec import RLRunSpec
from etude.operator import names
from etude.operator.builders.kuberay import num_workers


def has_stateful_set(run: RLRun, role: str) -> bool:
    """The role's pods come from a StatefulSet of its own."""
    kind = run.spec.scheduling.kind
    return kind == "StatefulSet" or (kind == "RayCluster" and role != names.TRAINER)


def resolved_spec(run: RLRun) -> RLRunSpec:
    """The spec as processes read it, with references resolved."""
    model, resolved = run.spec.model, run.status.resolved
    if model.checkpoint_ref is None or resolved is None or resolved.model_uri is None:
        return run.spec
    found = model.model_copy(update={"uri": resolved.model_uri, "checkpoint_ref": None})
    return run.spec.model_copy(update={"model": found})


def pool_name(run: RLRun, role: EnvironmentRole) -> str:
    """The pool that serves one of the run's environments."""
    if role.pool_ref is not None:
        return role.pool_ref.name
    return names.own_pool(run.metadata.name, role.name)


def pods_by_role(run: RLRun) -> dict[str, int]:
    """Pods by role while the run is running."""
    pods = {names.TRAINER: 1}
    if run.spec.scheduling.kind == "RayCluster":
        pods[names.TRAINER] += num_workers(run)
    if run.spec.roles.inference is not None:
        pods[names.INFERENCE] = engine_replicas(run)
    if run.spec.roles.rewards is not None:
        pods[names.REWARDS] = 1
    return pods


def desired_pods(run: RLRun) -> dict[str, int]:
    """Desired pods by role now: zero for released idle roles."""
    if run.status.released is None:
        return pods_by_role(run)
    return {role: pods if role == names.TRAINER else 0 for role, pods in pods_by_role(run).items()}


def least_pods(run: RLRun) -> dict[str, int]:
    """Least pods by role with which the run can start: engines may be fewer."""
    inference = run.spec.roles.inference
    least = desired_pods(run)
    if inference is None or not least[names.INFERENCE]:
        return least
    return least | {names.INFERENCE: inference.least_replicas}


def engine_replicas(run: RLRun) -> int:
    """Desired engines: the last decision, or the initial count of the spec."""
    role = run.spec.roles.inference
    if role is None:
        return 0
    chosen = run.status.engines.replicas if run.status.engines is not None else role.replicas
    return max(role.least_replicas, min(chosen, role.most_replicas))


def role_spec(run: RLRun, role: str) -> RoleSpec:
    """The spec of one role.

    Raises:
        KeyError: the run has no such role.
    """
    specs = {
        names.TRAINER: run.spec.roles.trainer,
        names.INFERENCE: run.spec.roles.inference,
        names.REWARDS: run.spec.roles.rewards,
    }
    spec = specs[role]
    if spec is None:
        raise KeyError(role)
    return spec


def run_labels(run: RLRun) -> dict[str, str]:
    """Labels of everything that a run owns."""
    return {names.MANAGED_BY: names.MANAGER, names.RUN: run.metadata.name}
