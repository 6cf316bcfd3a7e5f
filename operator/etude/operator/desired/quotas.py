"""A run's place in a queue of Kueue, as a Workload that its StatefulSets wait for.

API: kueue.x-k8s.io/v1beta2. Kueue cannot be taught our kind from outside its own program, so what
its job framework would do is done here: made once, its status told, then let go.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.operator.desired.jobsets import Part
from etude.operator.desired.workloads import head
from etude.operator.manifests import Manifest, Ref

API = "kueue.x-k8s.io/v1beta2"


class Priority(NamedTuple):
    """A place in the queue."""

    group: str
    kind: str
    name: str
    value: int


class Flavor(NamedTuple):
    """What a queue says about the pods of a role: one of its flavors, or an admission check."""

    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Manifest, ...] = ()
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


def workload(
    run: RLRun, labels: Mapping[str, str], parts: Iterable[Part], priority: Priority | None
) -> Manifest:
    """What the queue is to admit as a whole: every role with its pods.

    Args:
        run: the run.
        labels: of everything that it owns.
        parts: its roles.
        priority: its place in the queue.
    """
    manifest = head(run, API, "Workload", run.metadata.name, labels)
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


def of_flavor(manifest: Manifest) -> Flavor:
    """What a ResourceFlavor says."""
    spec = manifest.get("spec") or {}
    return Flavor(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))


def updates(live: Manifest) -> dict[str, list[Flavor]]:
    """What admission checks say of a Workload's pods, by role: where their machines are made."""
    found: dict[str, list[Flavor]] = defaultdict(list)
    for check in (live.get("status") or {}).get("admissionChecks") or ():
        for each in check.get("podSetUpdates") or ():
            found[each["name"]].append(
                Flavor(
                    each.get("nodeSelector") or {},
                    tuple(each.get("tolerations") or ()),
                    each.get("labels") or {},
                    each.get("annotations") or {},
                )
            )
    return dict(found)


def joined(parts: Iterable[Flavor]) -> Flavor:
    """What several say together: a flavor for each resource of a pod, then admission checks."""
    found = Flavor()
    for part in parts:
        found = Flavor(
            {**found.node_selector, **part.node_selector},
            (*found.tolerations, *part.tolerations),
            {**found.labels, **part.labels},
            {**found.annotations, **part.annotations},
        )
    return found


def clashes(flavor: Flavor, update: Flavor) -> Iterator[str]:
    """Keys to which an admission check gives another value than what was said before it."""
    for before, after in (
        (flavor.node_selector, update.node_selector),
        (flavor.labels, update.labels),
        (flavor.annotations, update.annotations),
    ):
        yield from (key for key in after if before.get(key, after[key]) != after[key])
