"""PodGroups of Volcano: gang scheduling of a run's pods.

API: scheduling.volcano.sh/v1beta1. A pod joins a PodGroup by an annotation.
"""

from collections.abc import Mapping

from etude.common.api.kinds import RLRun
from etude.operator import names
from etude.operator.builders.workload import object_head
from etude.operator.manifests import Manifest

API = "scheduling.volcano.sh/v1beta1"


def pod_group_name(run: RLRun, role: str) -> str | None:
    """Name of the PodGroup of a role's pods; None without gang scheduling."""
    gang = run.spec.scheduling.gang
    if gang is None:
        return None
    return run.metadata.name if gang.scope == "Run" else names.child(run.metadata.name, role)


def pod_groups(run: RLRun, labels: Mapping[str, str], pods: Mapping[str, int]) -> list[Manifest]:
    """The PodGroups of a run.

    Args:
        run: the run.
        labels: of everything that the run owns.
        pods: least number of pods by role.
    """
    members: dict[str, int] = {}
    for role, count in pods.items():
        group = pod_group_name(run, role)
        if group is not None and count:
            members[group] = members.get(group, 0) + count
    return [_pod_group(run, labels, name, count) for name, count in members.items()]


def _pod_group(run: RLRun, labels: Mapping[str, str], name: str, count: int) -> Manifest:
    priority = run.spec.scheduling.priority_class_name
    spec: Manifest = {"minMember": count}
    if priority is not None:
        spec["priorityClassName"] = priority
    return {**object_head(run, API, "PodGroup", name, labels), "spec": spec}
