"""A run as one JobSet: made once, then left to the JobSet's controller and to its queue.

API: jobset.x-k8s.io/v1alpha2; labels of Kueue: kueue.x-k8s.io.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from etude.common.api.kinds import RLRun
from etude.common.api.scheduling import Scheduling
from etude.operator import names
from etude.operator.desired.workloads import head
from etude.operator.manifests import Manifest, Ref

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
REQUIRED = "kueue.x-k8s.io/podset-required-topology"
PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"

FOR_EVER = 2**31 - 1
"""A Job counts every pod that is replaced; ours are to be replaced for as long as the run lasts."""

NEVER_DONE = """\
trap 'kill -TERM "$child" 2>/dev/null' TERM
"$@" &
child=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
[ "$code" -ne 0 ] || code=143
exit "$code\"
"""
"""A Job takes a container that ends well for work that is done, and makes no pod for it again. Ours
end well when they are told to go, by a drain or a queue, after they have saved."""


class Part(NamedTuple):
    """One role of the run."""

    role: str
    service: str
    """Headless Service that names its pods."""
    replicas: int
    template: Manifest


def job_set(run: RLRun, labels: Mapping[str, str], parts: Iterable[Part]) -> Manifest:
    """The run's roles as replicated Jobs of one JobSet, suspended if a queue is to start it."""
    scheduling = run.spec.scheduling
    name = run.metadata.name
    manifest = head(
        run, "jobset.x-k8s.io/v1alpha2", "JobSet", name, {**labels, **_queue(scheduling)}
    )
    manifest["spec"] = {
        "suspend": scheduling.admission == "JobSet",
        # Pods are named by the roles' own Services, as under StatefulSets.
        "network": {"enableDNSHostnames": False},
        "replicatedJobs": [
            {"name": part.role, "replicas": 1, "template": _job(part, labels, scheduling)}
            for part in parts
        ],
    }
    return manifest


def ref_of(run: RLRun) -> Ref:
    """The run's JobSet."""
    return Ref("JobSet", run.metadata.namespace, run.metadata.name)


def _queue(scheduling: Scheduling) -> dict[str, str]:
    given = {QUEUE: scheduling.queue_name, PRIORITY: scheduling.workload_priority_class_name}
    if scheduling.admission != "JobSet":
        return {}
    return {label: value for label, value in given.items() if value is not None}


def _job(part: Part, labels: Mapping[str, str], scheduling: Scheduling) -> Manifest:
    metadata = part.template["metadata"]
    topology = _topology(scheduling)
    if topology:
        metadata = {**metadata, "annotations": metadata.get("annotations", {}) | topology}
    containers = [
        c | {"command": ["/bin/sh", "-c", NEVER_DONE, part.role, *c["command"]]}
        if c["name"] == part.role
        else c
        for c in part.template["spec"]["containers"]
    ]
    ours = {"restartPolicy": "OnFailure", "subdomain": part.service, "containers": containers}
    spec = part.template["spec"] | ours
    return {
        "metadata": {"labels": {**labels, names.ROLE: part.role}},
        "spec": {
            "completionMode": "Indexed",
            "completions": part.replicas,
            "parallelism": part.replicas,
            "backoffLimit": FOR_EVER,
            # A pod that saves on its way out has its name and its devices until it is gone.
            "podReplacementPolicy": "Failed",
            "template": {"metadata": metadata, "spec": spec},
        },
    }


def _topology(scheduling: Scheduling) -> dict[str, str]:
    """What the queue places pods by: with it, only flavors that have a Topology are considered."""
    if scheduling.topology is None or scheduling.admission != "JobSet":
        return {}
    given = {REQUIRED: scheduling.topology.required, PREFERRED: scheduling.topology.preferred}
    return {annotation: key for annotation, key in given.items() if key is not None}
