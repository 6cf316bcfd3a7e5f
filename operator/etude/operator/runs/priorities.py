"""Priority of a run in its queue, as for Kueue's own jobs (pkg/util/priority)."""

from etude.common.api.kinds import RLRun
from etude.operator.builders import pod_overrides
from etude.operator.builders import run as desired
from etude.operator.builders.kueue import Priority
from etude.operator.runs.observe import Seen


def priority(run: RLRun, seen: Seen) -> Priority | None:
    """The run's WorkloadPriorityClass, else the PriorityClass of its pods; None without either."""
    name = run.spec.scheduling.workload_priority_class_name
    if name is None:
        return _of_pods(run, seen)
    value = seen.priorities.get(name)
    if value is None:
        return None
    return Priority("kueue.x-k8s.io", "WorkloadPriorityClass", name, value)


def _of_pods(run: RLRun, seen: Seen) -> Priority | None:
    """The class of the first role that has one, else that of pods without one."""
    name = next(filter(None, (_class_of(run, role) for role in desired.roles(run))), None)
    for known in seen.pod_priorities.values():
        itself = known["metadata"]["name"]
        if itself == name or (name is None and known.get("globalDefault", False)):
            return Priority("scheduling.k8s.io", "PriorityClass", itself, known["value"])
    return None


def _class_of(run: RLRun, role: str) -> str | None:
    """The PriorityClass of a role's pods; podTemplate overrides win."""
    spec = desired.role_spec(run, role)
    override = spec.pod_template.spec.get("priorityClassName")
    return str(override) if override else pod_overrides.classes(run, spec).get("priorityClassName")
