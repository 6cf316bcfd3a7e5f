"""A run's place in a queue of Kueue, as a Workload that its StatefulSets wait for.

API: kueue.x-k8s.io/v1beta2. Kueue cannot be taught our kind from outside its own program, so what
its job framework would do is done here: made once, its status told, then let go.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.operator.desired.jobsets import Part
from etude.operator.desired.workloads import head
from etude.operator.manifests import Manifest, Ref

API = "kueue.x-k8s.io/v1beta2"


class Flavor(NamedTuple):
    """What a queue says about the machines of a role."""

    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Manifest, ...] = ()


def workload(
    run: RLRun, labels: Mapping[str, str], parts: Iterable[Part], priority: int | None
) -> Manifest:
    """What the queue is to admit as a whole: every role with its pods.

    Args:
        run: the run.
        labels: of everything that it owns.
        parts: its roles.
        priority: that of the WorkloadPriorityClass that it names.
    """
    manifest = head(run, API, "Workload", run.metadata.name, labels)
    manifest["spec"] = {
        "queueName": run.spec.scheduling.queue_name,
        "podSets": [
            {"name": part.role, "count": part.replicas, "template": part.template} for part in parts
        ],
    }
    name = run.spec.scheduling.workload_priority_class_name
    if name is not None:
        named = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": name}
        manifest["spec"] |= {"priorityClassRef": named, "priority": priority}
    return manifest


def ref_of(run: RLRun) -> Ref:
    """The run's Workload."""
    return Ref("Workload", run.metadata.namespace, run.metadata.name)


def assigned(live: Manifest) -> dict[str, tuple[str, ...]]:
    """The flavors that a Workload was given, by role."""
    admission = (live.get("status") or {}).get("admission") or {}
    return {
        each["name"]: tuple(sorted(set((each.get("flavors") or {}).values())))
        for each in admission.get("podSetAssignments") or ()
    }


def joined(flavors: Iterable[Manifest]) -> Flavor:
    """What several flavors, one for each resource of a pod, say together."""
    selector: dict[str, str] = {}
    tolerations: list[Manifest] = []
    for flavor in flavors:
        spec = flavor.get("spec") or {}
        selector |= spec.get("nodeLabels") or {}
        tolerations += spec.get("tolerations") or ()
    return Flavor(selector, tuple(tolerations))
