"""JobSet of a run: created once, then left to the JobSet controller and to Kueue.

API: jobset.x-k8s.io/v1alpha2; labels of Kueue: kueue.x-k8s.io.
"""

from collections.abc import Iterable, Mapping

from etude.common.api.kinds import RLRun
from etude.common.api.run.scheduling import Scheduling
from etude.operator import names
from etude.operator.builders.workload import ReplicatedRole, object_head
from etude.operator.manifests import Manifest, Ref

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
REQUIRED = "kueue.x-k8s.io/podset-required-topology"
PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"

UNLIMITED = 2**31 - 1
"""Backoff limit: a Job counts every replaced pod, and ours are replaced for the whole run."""

EXIT_NONZERO = """\
trap 'kill -TERM "$child" 2>/dev/null' TERM
"$@" &
child=$!
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
[ "$code" -ne 0 ] || code=143
exit "$code\"
"""
"""Entry point that exits non-zero: a Job takes exit code 0 for finished work, and creates no pod
again. Ours exit 0 on SIGTERM, of a drain or an eviction, after they have saved."""


def job_set(run: RLRun, labels: Mapping[str, str], parts: Iterable[ReplicatedRole]) -> Manifest:
    """The run's roles as replicated Jobs of one JobSet, suspended if a queue must admit it."""
    scheduling = run.spec.scheduling
    name = run.metadata.name
    manifest = object_head(
        run, "jobset.x-k8s.io/v1alpha2", "JobSet", name, {**labels, **_queue_labels(scheduling)}
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


def job_set_ref(run: RLRun) -> Ref:
    """Identity of the run's JobSet."""
    return Ref("JobSet", run.metadata.namespace, run.metadata.name)


def _queue_labels(scheduling: Scheduling) -> dict[str, str]:
    given = {QUEUE_LABEL: scheduling.queue_name, PRIORITY: scheduling.workload_priority_class_name}
    if scheduling.admission != "JobSet":
        return {}
    return {label: value for label, value in given.items() if value is not None}


def _job(part: ReplicatedRole, labels: Mapping[str, str], scheduling: Scheduling) -> Manifest:
    metadata = part.template["metadata"]
    topology = _topology_annotations(scheduling)
    if topology:
        metadata = {**metadata, "annotations": metadata.get("annotations", {}) | topology}
    containers = [
        c | {"command": ["/bin/sh", "-c", EXIT_NONZERO, part.role, *c["command"]]}
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
            "backoffLimit": UNLIMITED,
            # A terminating pod that saves keeps its name and its devices until it is gone.
            "podReplacementPolicy": "Failed",
            "template": {"metadata": metadata, "spec": spec},
        },
    }


def _topology_annotations(scheduling: Scheduling) -> dict[str, str]:
    """Topology annotations for Kueue, which then considers only flavors with a Topology."""
    if scheduling.topology is None or scheduling.admission != "JobSet":
        return {}
    given = {REQUIRED: scheduling.topology.required, PREFERRED: scheduling.topology.preferred}
    return {annotation: key for annotation, key in given.items() if key is not None}
