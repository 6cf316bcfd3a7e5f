"""RayCluster (KubeRay) of a run's trainer: a head with the controller, workers for learners.

API: ray.io/v1. Created once, then left to KubeRay. A RayCluster and not a RayJob: the run's own
failure policy decides about failures.
"""

import copy
from collections.abc import Mapping

from etude.common.api.kinds import RLRun
from etude.operator import names
from etude.operator.builders.workload import ReplicatedRole, object_head
from etude.operator.manifests import Manifest

API = "ray.io/v1"
OWN_COMMANDS = "ray.io/overwrite-container-cmd"
"""Annotation with which KubeRay leaves the commands of containers alone."""
GROUP = "learners"

GCS_PORT = 6379
NODE_PORT = 6380
OBJECTS_PORT = 6381
METRICS_PORT = 6382
SERVED = {"gcs-server": GCS_PORT, "metrics": METRICS_PORT}
"""Of the head, by KubeRay's names: it makes a Service of all ports that the head names, and gives
metrics the port of our probes if none has that name; Kubernetes refuses a Service with one port
twice, and no pod is made without it."""
START = "ray start --disable-usage-stats"
PORTS = (
    f"--node-manager-port={NODE_PORT} --object-manager-port={OBJECTS_PORT}"
    f" --metrics-export-port={METRICS_PORT}"
)


def num_workers(run: RLRun) -> int:
    """Worker pods in addition to the head, for learner ranks beyond the head's GPUs."""
    trainer = run.spec.roles.trainer
    if not trainer.gpus_per_replica:
        return 0
    return -(-trainer.learner_ranks // trainer.gpus_per_replica) - 1


def ray_cluster(run: RLRun, labels: Mapping[str, str], trainer: ReplicatedRole) -> Manifest:
    """The trainer's pods: a head, and a group of workers if one pod is too small for the ranks."""
    gpus, count = run.spec.roles.trainer.gpus_per_replica, num_workers(run)
    manifest = object_head(
        run, API, "RayCluster", run.metadata.name, {**labels, names.ROLE: trainer.role}
    )
    manifest["metadata"]["annotations"] = {OWN_COMMANDS: "true"}
    worker = _worker_template(trainer, gpus)
    if run.spec.model.secret_ref is not None:
        _remove_last_secret(_container(worker, trainer.role))
    group = {
        "groupName": GROUP,
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "rayStartParams": {},
        "template": worker,
    }
    manifest["spec"] = {
        "headGroupSpec": {"rayStartParams": {}, "template": _head_template(trainer, gpus)},
        "workerGroupSpecs": [group] if count else [],
    }
    return manifest


def _head_template(part: ReplicatedRole, gpus: int) -> Manifest:
    """The trainer's pod with a Ray head that workers can join."""
    template = copy.deepcopy(part.template)
    # KubeRay gives pods no DNS names.
    template["spec"] |= {"hostname": names.pod(part.service, 0), "subdomain": part.service}
    container = _container(template, part.role)
    ours = " ".join(container["command"])
    # Ray refuses the dashboard's option on workers.
    head = f"--head --include-dashboard=false --port={GCS_PORT}"
    start = f"{START} {PORTS} {head} --num-cpus=1 --num-gpus={gpus}"
    container["command"] = ["/bin/sh", "-c", f"{start} && exec {ours}"]
    given = container.get("ports", [])
    taken = {port.get("name") for port in given}
    container["ports"] = [*given, *(_port(name) for name in SERVED if name not in taken)]
    container["env"] = [
        *container["env"],
        {"name": "RAY_ADDRESS", "value": f"127.0.0.1:{GCS_PORT}"},
    ]
    return template


def _worker_template(part: ReplicatedRole, gpus: int) -> Manifest:
    """A worker pod of the same size that joins the head at $FQ_RAY_IP, set by KubeRay."""
    template = copy.deepcopy(part.template)
    container = _container(template, part.role)
    join = f'{START} {PORTS} --address="$FQ_RAY_IP:{GCS_PORT}" --num-cpus=1 --num-gpus={gpus}'
    container["command"] = ["/bin/sh", "-c", f"exec {join} --block"]
    container.pop("startupProbe", None)
    container["ports"] = [_port("metrics")]
    probe = {"tcpSocket": {"port": NODE_PORT}, "periodSeconds": 5}
    container["readinessProbe"] = {**probe, "failureThreshold": 6}
    container["livenessProbe"] = {**probe, "failureThreshold": 120}
    return template


def _remove_last_secret(container: Manifest) -> None:
    """Remove the token of a hub: the controller on the head asks the hub, and no learner does."""
    *others, _ = container.pop("envFrom")
    if others:
        container["envFrom"] = others


def _port(name: str) -> Manifest:
    return {"name": name, "containerPort": SERVED[name], "protocol": "TCP"}


def _container(template: Manifest, role: str) -> Manifest:
    found: Manifest = next(c for c in template["spec"]["containers"] if c["name"] == role)
    return found
