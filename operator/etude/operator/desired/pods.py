"""Pod templates that pass the restricted Pod Security standard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.common.api.placement import Toleration
from etude.common.api.podtemplate import ResourceClaim
from etude.common.tls.wire import VARIABLE
from etude.operator.manifests import Manifest
from etude.operator.names import ROLE

PROBE_PORT = 8080
SPEC_FOLDER = "/etc/etude"
SCRATCH_FOLDER = "/scratch"
KEYS_FOLDER = "/etc/etude-keys"
EGRESS_FOLDER = "/etc/etude-egress"
TLS_FOLDER = "/etc/etude-tls"
USER_ID = 10_001
POD_INDEX = "metadata.labels['apps.kubernetes.io/pod-index']"
"""Where Kubernetes says which pod of its StatefulSet one is."""

_READ_ONLY = frozenset({"spec", "keys", "egress", "tls"})

START_LIMIT_S = 600
"""Importing a training stack or an engine on a busy machine may take minutes."""

UNRESPONSIVE_GRACE_S = 30
"""One that does not answer gets no longer than Kubernetes gives any pod that says nothing."""


_RESTRICTED: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


class Nearness(NamedTuple):
    """Pods that run in one part of the cluster."""

    labels: Mapping[str, str]
    """Of the pods."""
    topology_key: str
    """Node label whose value is the same for all of them."""
    is_required: bool
    """Whether a pod would rather not run than run elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCertificate:
    """What a pod's spec says of its certificate."""

    setting: str
    """Value of ETUDE_TLS."""
    volumes: Sequence[Manifest] = ()
    """The first one is mounted at TLS_FOLDER."""
    keeper: Manifest | None = None
    """A further container, without image and security context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What differs between the pods of our roles."""

    role: str
    image: str
    command: tuple[str, ...]
    ports: Mapping[str, int]
    """Named container ports; the probe port comes by itself. None: nobody calls or probes it."""
    spec_map: str | None = None
    """ConfigMap that is mounted at SPEC_FOLDER."""
    env: Sequence[Manifest] = ()
    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    claims: Sequence[ResourceClaim] = ()
    secret: str | None = None
    """Secret whose keys become environment variables."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Both beside ours, from a queue that has admitted it."""
    grace_s: int = 60
    shared_memory: bool = False
    """Whether its processes exchange data through /dev/shm."""
    devices: Sequence[str] = ()
    """Resources of device plugins, one of each."""
    keys_secret: str | None = None
    """Secret whose entry `keys` is a file in KEYS_FOLDER."""
    egress_secrets: Sequence[tuple[str, str]] = ()
    """Names and keys of Secrets, each a file NAME/KEY in EGRESS_FOLDER."""
    tolerations: Sequence[Manifest] = ()
    apart_from: Mapping[str, str] | None = None
    """Labels of pods that it shares no machine with."""
    near: Nearness | None = None
    """Which pods it shares a part of the cluster with."""
    seccomp_profile: str | None = None
    """Profile among the node's own, where the runtime's default forbids what the role is for."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Names of a PriorityClass and a RuntimeClass, by the pod spec's field."""
    certificate: PodCertificate | None = None
    """How its processes prove who they are to others."""
    group: str | None = None
    """PodGroup of Volcano that it is placed with."""
    over: Mapping[str, Any] = field(default_factory=dict)
    """Part of a pod template that is laid over what comes of the rest."""


def env(name: str, value: str) -> Manifest:
    """One environment variable; the API server drops an empty value, so we never send it."""
    return {"name": name, "value": value} if value else {"name": name}


def field_env(name: str, path: str) -> Manifest:
    """An environment variable with a fact about the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def base_env(ports: Mapping[str, int], *, attempt: int) -> list[Manifest]:
    """What every role is told about itself."""
    return [
        env("ETUDE_HOST", "0.0.0.0"),  # noqa: S104 - inside the pod's own network namespace
        env("ETUDE_PORT", str(next(iter(ports.values())))),
        env("ETUDE_PROBE_PORT", str(PROBE_PORT)),
        field_env("ETUDE_POD", "metadata.name"),
        env("ETUDE_ATTEMPT", str(attempt)),
        env("ETUDE_SCRATCH", SCRATCH_FOLDER),
        env("HOME", SCRATCH_FOLDER),
    ]


def toleration(toleration: Toleration) -> Manifest:
    """A toleration as a pod spec has it."""
    found = {
        "key": toleration.key,
        "operator": toleration.operator,
        "value": toleration.value,
        "effect": toleration.effect,
    }
    return {name: value for name, value in found.items() if value is not None}


def pod_spec(plan: Plan) -> Manifest:
    """The pod spec of one role."""
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": plan.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(plan)],
        "volumes": _volumes(plan),
    }
    if plan.certificate is not None and plan.certificate.keeper is not None:
        spec["initContainers"] = [_keeper(plan, plan.certificate.keeper)]
    if plan.node_selector:
        spec["nodeSelector"] = dict(plan.node_selector)
    if plan.tolerations:
        spec["tolerations"] = list(plan.tolerations)
    if plan.apart_from is not None:
        spec["affinity"] = _apart_from(plan.apart_from)
    if plan.near is not None:
        spec["affinity"] = _near(plan.near)
    if plan.claims:
        spec["resourceClaims"] = [_claim(each) for each in plan.claims]
    if plan.group is not None:
        spec["schedulerName"] = "volcano"
    spec |= plan.classes
    return spec


def _claim(claim: ResourceClaim) -> Manifest:
    return {
        "name": claim.name,
        "resourceClaimTemplateName": claim.resource_claim_template_name,
    }


def _apart_from(labels: Mapping[str, str]) -> Manifest:
    term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _near(near: Nearness) -> Manifest:
    """The first pod matches itself, which the scheduler takes for met wherever it goes."""
    term = {
        "labelSelector": {"matchLabels": dict(near.labels)},
        "topologyKey": near.topology_key,
    }
    if near.is_required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}


def job_spec(plan: Plan, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Manifest:
    """The spec of a Job that runs one such pod to its end."""
    return {
        "backoffLimit": 2,
        "ttlSecondsAfterFinished": 600,
        "template": {
            "metadata": {
                "labels": {**labels, ROLE: plan.role},
                "annotations": dict(annotations),
            },
            "spec": {**pod_spec(plan), "restartPolicy": "Never"},
        },
    }


def _container(plan: Plan) -> Manifest:
    container: Manifest = {
        "name": plan.role,
        "image": plan.image,
        "command": list(plan.command),
        "env": [*plan.env, *_wire(plan)],
        **(_served(plan) if plan.ports else {}),
        "securityContext": {**_RESTRICTED, **_seccomp(plan)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_mount(name, path) for name, path in _mounts(plan).items()],
    }
    if plan.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": plan.secret}}]
    resources = _resources(plan)
    if resources:
        container["resources"] = resources
    return container


def _keeper(plan: Plan, keeper: Manifest) -> Manifest:
    """In the image of the pod's role, which its machine has anyway."""
    policy = "FallbackToLogsOnError"
    own = {"image": plan.image, "securityContext": _RESTRICTED, "terminationMessagePolicy": policy}
    return {**keeper, **own}


def _wire(plan: Plan) -> list[Manifest]:
    return [] if plan.certificate is None else [env(VARIABLE, plan.certificate.setting)]


def _seccomp(plan: Plan) -> Manifest:
    if plan.seccomp_profile is None:
        return {}
    return {"seccompProfile": {"type": "Localhost", "localhostProfile": plan.seccomp_profile}}


def _served(plan: Plan) -> Manifest:
    ports = {**plan.ports, "probe": PROBE_PORT}
    return {
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
        ],
        "startupProbe": _probe("/livez", period_s=2, failures=START_LIMIT_S // 2),
        "livenessProbe": {
            **_probe("/livez", period_s=10, failures=12),
            # One that does not answer has nothing to end in order.
            "terminationGracePeriodSeconds": min(UNRESPONSIVE_GRACE_S, plan.grace_s),
        },
        "readinessProbe": _probe("/readyz", period_s=2, failures=5),
    }


def _probe(path: str, *, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": PROBE_PORT},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(plan: Plan) -> Manifest:
    requests: Manifest = {}
    limits: Manifest = {}
    if plan.cpu is not None:
        requests["cpu"] = plan.cpu
    if plan.memory is not None:
        requests["memory"] = limits["memory"] = plan.memory
    if plan.gpus:
        requests[plan.gpu_resource] = limits[plan.gpu_resource] = str(plan.gpus)
    for device in plan.devices:
        requests[device] = limits[device] = "1"
    claims = [{"name": claim.name} for claim in plan.claims]
    parts = (("requests", requests), ("limits", limits), ("claims", claims))
    return {name: part for name, part in parts if part}


def _mounts(plan: Plan) -> dict[str, str]:
    mounts = {"scratch": SCRATCH_FOLDER, "tmp": "/tmp"}  # noqa: S108 - its own
    if plan.spec_map is not None:
        mounts["spec"] = SPEC_FOLDER
    if plan.keys_secret is not None:
        mounts["keys"] = KEYS_FOLDER
    if plan.egress_secrets:
        mounts["egress"] = EGRESS_FOLDER
    if plan.shared_memory:
        mounts["shm"] = "/dev/shm"  # noqa: S108 - its own
    if plan.certificate is not None and plan.certificate.volumes:
        mounts["tls"] = TLS_FOLDER
    return mounts


def _mount(name: str, path: str) -> Manifest:
    mount: Manifest = {"name": name, "mountPath": path}
    return mount | {"readOnly": True} if name in _READ_ONLY else mount


def _volumes(plan: Plan) -> list[Manifest]:
    own = [_volume(name, plan) for name in _mounts(plan) if name != "tls"]
    return own if plan.certificate is None else [*own, *plan.certificate.volumes]


def _volume(name: str, plan: Plan) -> Manifest:
    match name:
        case "spec":
            return {"name": name, "configMap": {"name": plan.spec_map}}
        case "keys":
            items = [{"key": "keys", "path": "keys"}]
            return {"name": name, "secret": {"secretName": plan.keys_secret, "items": items}}
        case "egress":
            sources = [
                {"secret": {"name": secret, "items": [{"key": key, "path": f"{secret}/{key}"}]}}
                for secret, key in plan.egress_secrets
            ]
            # Else every user of the container reads them, that of a guest's monitor too.
            return {"name": name, "projected": {"sources": sources, "defaultMode": 0o440}}
        case "shm":
            return {"name": name, "emptyDir": {"medium": "Memory"}}
        case _:
            return {"name": name, "emptyDir": {}}
