"""Kueue Workload of a run, for whose admission its StatefulSets wait.

API: kueue.x-k8s.io/v1beta2. Kueue's job framework cannot be extended by another program, so the
operator does its part here: create the Workload, write its status, delete it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.operator.builders.workload import ReplicatedRole, object_head
from etude.operator.manifests import Manifest, Ref

API = "kueue.x-k8s.io/v1beta2"


class QueuePriority(NamedTuple):
    """Priority of a Workload and the class that it comes from."""

    group: str
    kind: str
    name: str
    value: int


class NodeFlavor(NamedTuple):
    """Scheduling constraints for the pods of a role, by a ResourceFlavor or an admission check."""

    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Manifest, ...] = ()
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


def workload(
    run: RLRun,
    labels: Mapping[str, str],
    parts: Iterable[ReplicatedRole],
    priority: QueuePriority | None,
) -> Manifest:
    """The Workload that the queue admits as a whole: every role with its pods.

    Args:
        run: the run.
        labels: of everything that the run owns.
        parts: its roles.
        priority: of the Workload.
    """
    manifest = object_head(run, API, "Workload", run.metadata.name, labels)
    manifest["spec"] = {
        "queueName": run.spec.scheduling.queue_name,
        "podSets": [
            {"name": part.role, "count": part.replicas, "template": part.template} for part in parts
        ],
    }
    if priority is not None:
        named = {"group": priority.group, "kind": priority.kind, "name": priority.name}
        manifest["spec"] |= {"priorityClassRef": named, "priority": priority.value}
    return manifest


def workload_ref(run: RLRun) -> Ref:
    """Identity of the run's Workload."""
    return Ref("Workload", run.metadata.namespace, run.metadata.name)


def assigned_flavors(live: Manifest) -> dict[str, tuple[str, ...]]:
    """Names of the flavors assigned to a Workload, by role."""
    admission = (live.get("status") or {}).get("admission") or {}
    return {
        each["name"]: tuple(sorted(set((each.get("flavors") or {}).values())))
        for each in admission.get("podSetAssignments") or ()
    }


def node_flavor(manifest: Manifest) -> NodeFlavor:
    """The scheduling constraints of a ResourceFlavor."""
    spec = manifest.get("spec") or {}
    return NodeFlavor(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))


def pod_set_updates(live: Manifest) -> dict[str, list[NodeFlavor]]:
    """Pod set updates by a Workload's admission checks, by role."""
    updates: dict[str, list[NodeFlavor]] = defaultdict(list)
    for check in (live.get("status") or {}).get("admissionChecks") or ():
        for update in check.get("podSetUpdates") or ():
            updates[update["name"]].append(
                NodeFlavor(
                    update.get("nodeSelector") or {},
                    tuple(update.get("tolerations") or ()),
                    update.get("labels") or {},
                    update.get("annotations") or {},
                )
            )
    return dict(updates)


def merge_flavors(parts: Iterable[NodeFlavor]) -> NodeFlavor:
    """The union of constraints: of each resource's flavor, then of admission checks."""
    merged = NodeFlavor()
    for part in parts:
        merged = NodeFlavor(
            {**merged.node_selector, **part.node_selector},
            (*merged.tolerations, *part.tolerations),
            {**merged.labels, **part.labels},
            {**merged.annotations, **part.annotations},
        )
    return merged


def conflicting_keys(flavor: NodeFlavor, update: NodeFlavor) -> Iterator[str]:
    """Keys for which an admission check has another value than the flavor."""
    for before, after in (
        (flavor.node_selector, update.node_selector),
        (flavor.labels, update.labels),
        (flavor.annotations, update.annotations),
    ):
        yield from (key for key in after if before.get(key, after[key]) != after[key])
