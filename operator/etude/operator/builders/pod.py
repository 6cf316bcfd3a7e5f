"""Pod templates that pass the restricted Pod Security standard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from etude.common.api.pool.placement import Toleration
from etude.common.api.run.pod_template import ResourceClaim
from etude.common.tls.transport import VARIABLE
from etude.operator.manifests import Manifest
from etude.operator.names import ROLE

PROBE_PORT = 8080
SPEC_FOLDER = "/etc/etude"
SCRATCH_FOLDER = "/scratch"
KEYS_FOLDER = "/etc/etude-keys"
EGRESS_FOLDER = "/etc/etude-egress"
TLS_FOLDER = "/etc/etude-tls"
USER_ID = 10_001

_READ_ONLY = frozenset({"spec", "keys", "egress", "tls"})
"""Volumes; those of secret folders are read-only too."""

START_LIMIT_S = 600
"""Importing a training stack or an engine on a busy node may take minutes."""

UNRESPONSIVE_GRACE_S = 30
"""Grace period of a container that fails its liveness probe: the default of Kubernetes."""


_RESTRICTED: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


class PodAffinity(NamedTuple):
    """Affinity among pods: they share a topology domain."""

    labels: Mapping[str, str]
    """Labels of the pods."""
    topology_key: str
    """Node label whose value they share."""
    is_required: bool
    """Required during scheduling, not only preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCertificate:
    """Certificate settings of a pod's spec."""

    setting: str
    """Value of ETUDE_TLS."""
    volumes: Sequence[Manifest] = ()
    """Volumes; the first one is mounted at TLS_FOLDER."""
    sidecar: Manifest | None = None
    """The renewal sidecar, without image and security context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """Resource requests and limits of a pod's container."""

    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    claims: Sequence[ResourceClaim] = ()
    devices: Sequence[str] = ()
    """Resources of device plugins, one of each."""


class SecretFolder(NamedTuple):
    """Entries of a Secret as files of a folder."""

    volume: str
    path: str
    secret: str
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFiles:
    """Volumes of a pod, in addition to its scratch folders and its certificate."""

    spec_map: str | None = None
    """ConfigMap that is mounted at SPEC_FOLDER."""
    keys_secret: str | None = None
    """Secret whose entry `keys` is a file in KEYS_FOLDER."""
    egress_secrets: Sequence[tuple[str, str]] = ()
    """Names and keys of Secrets, each a file NAME/KEY in EGRESS_FOLDER."""
    folders: Sequence[SecretFolder] = ()
    """Further Secrets."""
    shared_memory: bool = False
    """Its processes exchange data through /dev/shm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlacement:
    """Scheduling constraints of a pod."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Manifest] = ()
    affinity: PodAffinity | None = None
    """Affinity to other pods."""
    anti_affinity: Mapping[str, str] | None = None
    """Labels of pods with which it must not share a node."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Names of a PriorityClass and a RuntimeClass, by the pod spec's field."""
    pod_group: str | None = None
    """PodGroup of Volcano that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOverrides:
    """Additions of others to a pod template."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Labels and annotations in addition to the operator's, from the queue's admission."""
    patch: Mapping[str, Any] = field(default_factory=dict)
    """Strategic merge patch of the spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePod:
    """A pod of one role: everything that differs between roles."""

    role: str
    image: str
    command: tuple[str, ...]
    ports: Mapping[str, int]
    """Named container ports in addition to the probe port; without any there are no probes."""
    env: Sequence[Manifest] = ()
    secret: str | None = None
    """Secret whose keys become environment variables."""
    more_secrets: Sequence[str] = ()
    """Further ones."""
    grace_s: int = 60
    delay_s: int = 0
    """Wait before SIGTERM, in which callers learn that the pod goes; part of the grace period."""
    seccomp_profile: str | None = None
    """Localhost profile of the node, where the runtime's default forbids what the role does."""
    certificate: PodCertificate | None = None
    """Certificate of its processes."""
    resources: PodResources = PodResources()
    files: PodFiles = PodFiles()
    placement: PodPlacement = PodPlacement()
    overrides: TemplateOverrides = TemplateOverrides()


def env(name: str, value: str) -> Manifest:
    """One environment variable; the API server drops an empty value, so we never send it."""
    return {"name": name, "value": value} if value else {"name": name}


def field_env(name: str, path: str) -> Manifest:
    """An environment variable with a fact about the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def base_env(ports: Mapping[str, int], *, attempt: int) -> list[Manifest]:
    """Environment variables that every role gets."""
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
    fields = {
        "key": toleration.key,
        "operator": toleration.operator,
        "value": toleration.value,
        "effect": toleration.effect,
    }
    return {name: value for name, value in fields.items() if value is not None}


def pod_spec(pod: RolePod) -> Manifest:
    """The pod spec of one role."""
    placement = pod.placement
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pod.grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(pod)],
        "volumes": _volumes(pod),
    }
    if pod.certificate is not None and pod.certificate.sidecar is not None:
        spec["initContainers"] = [_sidecar(pod, pod.certificate.sidecar)]
    if placement.node_selector:
        spec["nodeSelector"] = dict(placement.node_selector)
    if placement.tolerations:
        spec["tolerations"] = list(placement.tolerations)
    if placement.anti_affinity is not None:
        spec["affinity"] = _anti_affinity(placement.anti_affinity)
    if placement.affinity is not None:
        spec["affinity"] = _affinity(placement.affinity)
    if pod.resources.claims:
        spec["resourceClaims"] = [_claim(each) for each in pod.resources.claims]
    if placement.pod_group is not None:
        spec["schedulerName"] = "volcano"
    spec |= placement.classes
    return spec


def _claim(claim: ResourceClaim) -> Manifest:
    return {
        "name": claim.name,
        "resourceClaimTemplateName": claim.resource_claim_template_name,
    }


def _anti_affinity(labels: Mapping[str, str]) -> Manifest:
    term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _affinity(near: PodAffinity) -> Manifest:
    """Pod affinity; the scheduler lets the first pod, which only matches itself, go anywhere."""
    term = {
        "labelSelector": {"matchLabels": dict(near.labels)},
        "topologyKey": near.topology_key,
    }
    if near.is_required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighted = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": weighted}}


def job_spec(pod: RolePod, labels: Mapping[str, str], annotations: Mapping[str, str]) -> Manifest:
    """The spec of a Job that runs one such pod to its end."""
    return {
        "backoffLimit": 2,
        "ttlSecondsAfterFinished": 600,
        "template": {
            "metadata": {
                "labels": {**labels, ROLE: pod.role},
                "annotations": dict(annotations),
            },
            "spec": {**pod_spec(pod), "restartPolicy": "Never"},
        },
    }


def _container(pod: RolePod) -> Manifest:
    container: Manifest = {
        "name": pod.role,
        "image": pod.image,
        "command": list(pod.command),
        "env": [*pod.env, *_tls_env(pod)],
        **(_ports_and_probes(pod) if pod.ports else {}),
        "securityContext": {**_RESTRICTED, **_seccomp(pod)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            *(_mount(name, path) for name, path in _mounts(pod).items()),
            *(_mount(f.volume, f.path) | {"readOnly": True} for f in pod.files.folders),
        ],
    }
    if pod.delay_s:
        container["lifecycle"] = {"preStop": {"sleep": {"seconds": pod.delay_s}}}
    secrets = [*([] if pod.secret is None else [pod.secret]), *pod.more_secrets]
    if secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in secrets]
    resources = _resources(pod.resources)
    if resources:
        container["resources"] = resources
    return container


def _sidecar(pod: RolePod, keeper: Manifest) -> Manifest:
    """The renewal sidecar in the image of the pod's role, which the node has anyway."""
    policy = "FallbackToLogsOnError"
    own = {"image": pod.image, "securityContext": _RESTRICTED, "terminationMessagePolicy": policy}
    return {**keeper, **own}


def _tls_env(pod: RolePod) -> list[Manifest]:
    return [] if pod.certificate is None else [env(VARIABLE, pod.certificate.setting)]


def _seccomp(pod: RolePod) -> Manifest:
    if pod.seccomp_profile is None:
        return {}
    return {"seccompProfile": {"type": "Localhost", "localhostProfile": pod.seccomp_profile}}


def _ports_and_probes(pod: RolePod) -> Manifest:
    ports = {**pod.ports, "probe": PROBE_PORT}
    return {
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()
        ],
        "startupProbe": _probe("/livez", period_s=2, failures=START_LIMIT_S // 2),
        "livenessProbe": {
            **_probe("/livez", period_s=10, failures=12),
            # An unresponsive process cannot shut down in order.
            "terminationGracePeriodSeconds": min(UNRESPONSIVE_GRACE_S, pod.grace_s),
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


def _resources(resources: PodResources) -> Manifest:
    requests: Manifest = {}
    limits: Manifest = {}
    if resources.cpu is not None:
        requests["cpu"] = resources.cpu
    if resources.memory is not None:
        requests["memory"] = limits["memory"] = resources.memory
    if resources.gpus:
        requests[resources.gpu_resource] = limits[resources.gpu_resource] = str(resources.gpus)
    for device in resources.devices:
        requests[device] = limits[device] = "1"
    claims = [{"name": claim.name} for claim in resources.claims]
    parts = (("requests", requests), ("limits", limits), ("claims", claims))
    return {name: part for name, part in parts if part}


def _mounts(pod: RolePod) -> dict[str, str]:
    files = pod.files
    mounts = {"scratch": SCRATCH_FOLDER, "tmp": "/tmp"}  # noqa: S108 - its own
    if files.spec_map is not None:
        mounts["spec"] = SPEC_FOLDER
    if files.keys_secret is not None:
        mounts["keys"] = KEYS_FOLDER
    if files.egress_secrets:
        mounts["egress"] = EGRESS_FOLDER
    if files.shared_memory:
        mounts["shm"] = "/dev/shm"  # noqa: S108 - its own
    if pod.certificate is not None and pod.certificate.volumes:
        mounts["tls"] = TLS_FOLDER
    return mounts


def _mount(name: str, path: str) -> Manifest:
    mount: Manifest = {"name": name, "mountPath": path}
    return mount | {"readOnly": True} if name in _READ_ONLY else mount


def _volumes(pod: RolePod) -> list[Manifest]:
    own = [_volume(name, pod.files) for name in _mounts(pod) if name != "tls"]
    own += [_secret_volume(folder) for folder in pod.files.folders]
    return own if pod.certificate is None else [*own, *pod.certificate.volumes]


def _secret_volume(folder: SecretFolder) -> Manifest:
    items = [{"key": entry, "path": entry} for entry in folder.entries]
    secret = {"secretName": folder.secret, "items": items, "defaultMode": 0o440}
    return {"name": folder.volume, "secret": secret}


def _volume(name: str, files: PodFiles) -> Manifest:
    match name:
        case "spec":
            return {"name": name, "configMap": {"name": files.spec_map}}
        case "keys":
            items = [{"key": "keys", "path": "keys"}]
            return {"name": name, "secret": {"secretName": files.keys_secret, "items": items}}
        case "egress":
            sources = [
                {"secret": {"name": secret, "items": [{"key": key, "path": f"{secret}/{key}"}]}}
                for secret, key in files.egress_secrets
            ]
            # Else every user of the container could read them, a guest's monitor included.
            return {"name": name, "projected": {"sources": sources, "defaultMode": 0o440}}
        case "shm":
            return {"name": name, "emptyDir": {"medium": "Memory"}}
        case _:
            return {"name": name, "emptyDir": {}}
