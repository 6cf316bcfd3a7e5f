"""Children of a pool: ConfigMap, brokers, hosts, environment API, certificates and policies."""

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal

from etude.common.api.kinds import EnvPool
from etude.common.api.pool.autoscaling import Autoscaling
from etude.common.api.pool.backend import Backend
from etude.common.api.pool.environment_api import EnvironmentApi
from etude.common.api.pool.spec import DriverName
from etude.common.role_inputs import ResolvedPool
from etude.common.tls import targets
from etude.operator import names
from etude.operator.builders import certificates, network_policies
from etude.operator.builders.addresses import PORTS, broker_service
from etude.operator.builders.platform import COMMANDS, Platform, has_own_nodes, traces_env
from etude.operator.builders.pod import (
    EGRESS_FOLDER,
    KEYS_FOLDER,
    SPEC_FOLDER,
    PodCertificate,
    PodFiles,
    PodPlacement,
    PodResources,
    RolePod,
    SecretFolder,
    base_env,
    env,
    field_env,
    pod_spec,
    toleration,
)
from etude.operator.builders.strategic_merge import strategic_merge
from etude.operator.builders.workload import config_map, object_head, service, stateful_set
from etude.operator.manifests import RESOURCES, Manifest, parse_quantity, stamp_digest


def sandbox(
    pool: EnvPool, name: str, labels: Mapping[str, str], pod: RolePod, template: Manifest
) -> Manifest:
    """A host's pod as a Sandbox, with the platform's template merged over it.

    Args:
        pool: of the host.
        name: of the Sandbox and of its pod.
        labels: of both.
        pod: of the host, without the template.
        template: the SandboxTemplate.
    """
    blueprint = template.get("spec", {})
    over = blueprint.get("podTemplate", {})
    metadata = over.get("metadata", {})
    pod_template: Manifest = {
        "metadata": {"labels": {**metadata.get("labels", {}), **labels}},
        "spec": strategic_merge(pod_spec(pod), over.get("spec", {})),
    }
    if metadata.get("annotations"):
        pod_template["metadata"]["annotations"] = metadata["annotations"]
    spec: Manifest = {"podTemplate": pod_template}
    if blueprint.get("volumeClaimTemplates"):
        spec["volumeClaimTemplates"] = blueprint["volumeClaimTemplates"]
    api_version = RESOURCES["Sandbox"].api_version
    return {**object_head(pool, api_version, "Sandbox", name, labels), "spec": spec}


_SIZE = ("replicas", "max_replicas", "min_idle", "overcommit_factor", "autoscaling")

ENVSERVER = "envserver"
"""Name of the image that brokers and hosts share."""

SUPERVISED_COMMAND = ("etude-envserver", "supervise")
"""Command of a host whose VMs survive the death of its daemon, and end with the pod."""

POOL_ENTRY = "pool.json"
"""Entry of a pool's ConfigMap with its spec for brokers and hosts."""
BROKER_GRACE_S = 30
HOST_GRACE_S = 60
API_GRACE_S = 30

PULL_FOLDER, PULL_ENTRY = "/etc/etude/pull", ".dockerconfigjson"
"""Folder of the credentials of registries, and their entry in a Secret of that type."""


def pool_children(
    pool: EnvPool,
    ordinals: tuple[int, ...],
    images: Mapping[str, str],
    platform: Platform,
    template: Manifest | None = None,
) -> list[Manifest]:
    """The children of a pool, with the hosts of the given ordinals, in the order to apply them.

    Args:
        pool: the pool.
        ordinals: of its hosts.
        images: by their names.
        platform: configuration of the operator.
        template: SandboxTemplate of its hosts, for backend AgentSandbox.
    """
    labels = pool_labels(pool)
    name = names.child(pool.metadata.name, names.BROKER)
    broker_labels = {**labels, names.ROLE: names.BROKER}
    pod = _pool_pod(pool, names.BROKER, images, platform)
    num_brokers = 0 if pool.spec.is_released else pool.spec.brokers
    children = [
        _pool_map(pool),
        service(pool, name, broker_labels, PORTS[names.BROKER]),
        stateful_set(pool, name, broker_labels, pod, replicas=num_brokers, attempt=0),
        *environment_api_objects(
            pool, labels, images[ENVSERVER], _certificate(pool, names.ENVIRONMENT_API, platform)
        ),
        *(_host(pool, ordinal, images, platform, template) for ordinal in ordinals),
    ]
    children += _certificates(pool, platform)
    if platform.namespace is not None and pool.spec.network.policy == "Managed":
        asks = certificates.asks_issuer(platform.tls)
        children += network_policies.pool_policies(
            pool, platform.namespace, asks_issuer=asks, grants_reads=has_own_nodes(platform, pool)
        )
    return [stamp_digest(child) for child in children]


def _certificates(pool: EnvPool, platform: Platform) -> list[Manifest]:
    if platform.tls is None:
        return []
    parts = [
        names.BROKER,
        names.HOST,
        *([names.ENVIRONMENT_API] if pool.spec.edge is not None else []),
    ]
    identities = [certificates.pool_identity(platform.tls, pool, part) for part in parts]
    return certificates.certificate_objects(pool, platform.tls, identities)


def _certificate(pool: EnvPool, role: str, platform: Platform) -> PodCertificate | None:
    if platform.tls is None:
        return None
    identity = certificates.pool_identity(platform.tls, pool, role)
    return certificates.pod_certificate(platform.tls, identity)


def pool_labels(pool: EnvPool) -> dict[str, str]:
    """Labels of everything that a pool owns; those of its run too, when it has one."""
    labels = {names.MANAGED_BY: names.MANAGER, names.POOL: pool.metadata.name}
    return labels | {names.RUN: pool.run} if pool.run else labels


def host_pod_name(pool: str, ordinal: int) -> str:
    """Name of the pod of one host."""
    return names.pod(names.child(pool, names.HOST), ordinal)


def _pool_map(pool: EnvPool) -> Manifest:
    # Scaling fields are the operator's alone: scaling must not change the file that pods read.
    size: dict[str, object] = dict.fromkeys(_SIZE)
    if pool.spec.is_sized_for_demand:
        # With a mode, brokers fill one host after the other, so that empty ones can go.
        size |= {"autoscaling": Autoscaling(mode=pool.spec.mode), "max_replicas": 1}
    resolved = ResolvedPool(
        name=pool.metadata.name,
        namespace=pool.metadata.namespace,
        uid=pool.metadata.uid,
        spec=pool.spec.model_copy(update=size),
    )
    name = names.child(pool.metadata.name, "pool")
    return config_map(pool, name, pool_labels(pool), {POOL_ENTRY: resolved.to_json()})


def _pool_pod(pool: EnvPool, role: str, images: Mapping[str, str], platform: Platform) -> RolePod:
    # Brokers read no tasks themselves; they grant reads to hosts that have no credentials.
    reader = names.BROKER if has_own_nodes(platform, pool) else names.HOST
    store = pool.spec.store if role == reader else None
    secret = store.secret_ref if store is not None else None
    variables = [
        *base_env(PORTS[role], attempt=0),
        env("ETUDE_POOL_FILE", f"{SPEC_FOLDER}/{POOL_ENTRY}"),
        *traces_env(platform),
        *_otlp_env(pool),
    ]
    variables += [
        field_env("ETUDE_POD_IP", "status.podIP"),
        env("ETUDE_ADVERTISE", _advertised_address(pool, role, platform)),
        env("ETUDE_BROKER_TARGET", broker_service(pool.metadata.name)),
    ]
    if role == names.HOST:
        variables += [
            *_egress_env(pool),
            *_pull_env(pool),
        ]
    return RolePod(
        role=role,
        image=images[ENVSERVER],
        command=SUPERVISED_COMMAND
        if role == names.HOST and _outlives_daemon(pool)
        else COMMANDS[role],
        ports=PORTS[role],
        env=variables,
        grace_s=HOST_GRACE_S if role == names.HOST else BROKER_GRACE_S,
        secret=secret.name if secret is not None else None,
        seccomp_profile=platform.host_seccomp_profile if role == names.HOST else None,
        resources=PodResources(devices=_devices(pool, role, platform)),
        files=PodFiles(
            spec_map=names.child(pool.metadata.name, "pool"),
            egress_secrets=_egress_secrets(pool) if role == names.HOST else (),
            folders=_pull_secrets(pool) if role == names.HOST else (),
        ),
        certificate=_certificate(pool, role, platform),
    )


def _advertised_address(pool: EnvPool, role: str, platform: Platform) -> str:
    """Address of a pod; with TLS, prefixed by the name that its certificate must have."""
    address = f"$(ETUDE_POD_IP):{PORTS[role]['grpc']}"
    workload = names.child(pool.metadata.name, role)
    return address if platform.tls is None else targets.named_target(workload, address)


def _egress_secrets(pool: EnvPool) -> list[tuple[str, str]]:
    """Credentials that hosts add to egress requests: names and keys of Secrets, each once."""
    given = [rule.credential for rule in pool.spec.network.listed if rule.credential is not None]
    return sorted({(each.secret_ref.name, each.key) for each in given})


def _egress_env(pool: EnvPool) -> list[Manifest]:
    return [env("ETUDE_EGRESS_SECRETS", EGRESS_FOLDER)] if _egress_secrets(pool) else []


def _pull_secrets(pool: EnvPool) -> list[SecretFolder]:
    """Credentials with which hosts pull the images of tasks."""
    images = pool.spec.images
    if images is None or images.pull_secret_ref is None:
        return []
    name = images.pull_secret_ref.name
    return [SecretFolder("pull", PULL_FOLDER, name, (PULL_ENTRY,))]


def _pull_env(pool: EnvPool) -> list[Manifest]:
    path = f"{PULL_FOLDER}/{PULL_ENTRY}"
    return [env("ETUDE_PULL_CREDENTIALS", path)] if _pull_secrets(pool) else []


def _with_placement(pod: RolePod, pool: EnvPool) -> RolePod:
    placement = pool.spec.placement
    siblings = {names.POOL: pool.metadata.name, names.ROLE: names.HOST}
    return replace(
        pod,
        resources=replace(pod.resources, cpu=_cpu(pool)),
        placement=PodPlacement(
            node_selector=placement.node_selector,
            tolerations=[toleration(each) for each in placement.tolerations],
            anti_affinity=siblings if placement.one_per_machine else None,
        ),
    )


def _cpu(pool: EnvPool) -> str | None:
    slot = pool.spec.slot
    if slot.cpu is None:
        return None
    cores = parse_quantity(slot.cpu)
    assert isinstance(cores, Decimal), slot.cpu  # noqa: S101 - the schema admits nothing else
    return f"{math.ceil(1000 * cores * pool.spec.slots_per_replica)}m"


def _host(
    pool: EnvPool,
    ordinal: int,
    images: Mapping[str, str],
    platform: Platform,
    template: Manifest | None,
) -> Manifest:
    labels = {**pool_labels(pool), names.ROLE: names.HOST}
    pod = _with_placement(_pool_pod(pool, names.HOST, images, platform), pool)
    name = host_pod_name(pool.metadata.name, ordinal)
    if pool.spec.backend is Backend.AGENT_SANDBOX:
        return sandbox(pool, name, labels, pod, template or {})
    return {**object_head(pool, "v1", "Pod", name, labels), "spec": pod_spec(pod)}


def _devices(pool: EnvPool, role: str, platform: Platform) -> tuple[str, ...]:
    if role != names.HOST or not _runs_vms(pool) or platform.kvm_resource is None:
        return ()
    return (platform.kvm_resource,)


def _runs_vms(pool: EnvPool) -> bool:
    return pool.spec.isolation.driver is not DriverName.GVISOR and _outlives_daemon(pool)


def _outlives_daemon(pool: EnvPool) -> bool:
    """The pool's environments may outlive a host daemon that dies: VMs and containers do."""
    return pool.spec.isolation.driver is not DriverName.PROCESS and any(
        template.image for template in pool.spec.templates
    )


def _otlp_env(pool: EnvPool) -> list[Manifest]:
    endpoint = pool.spec.observability.otlp_endpoint
    return [] if endpoint is None else [env("ETUDE_OTLP_ENDPOINT", endpoint)]


def environment_api_objects(
    pool: EnvPool, labels: Mapping[str, str], image: str, certificate: PodCertificate | None = None
) -> list[Manifest]:
    """Service and StatefulSet of the environment API of a pool with spec.edge; at most one pod.

    Sandboxes belong to their API server's process: with a second pod, half of the requests would
    miss theirs, as they would while a Deployment replaces its pod.
    """
    if pool.spec.edge is None:
        return []
    name = names.child(pool.metadata.name, names.ENVIRONMENT_API)
    own = {**labels, names.ROLE: names.ENVIRONMENT_API}
    pod = replace(_api_pod(pool, pool.spec.edge, image), certificate=certificate)
    replicas = 0 if pool.spec.is_released else 1
    return [
        service(pool, name, own, PORTS[names.ENVIRONMENT_API], is_headless=False),
        stateful_set(pool, name, own, pod, replicas=replicas, attempt=0),
    ]


def _api_pod(pool: EnvPool, edge: EnvironmentApi, image: str) -> RolePod:
    variables = [
        *base_env(PORTS[names.ENVIRONMENT_API], attempt=0),
        env("ETUDE_BROKER_TARGET", broker_service(pool.metadata.name)),
        env("ETUDE_EDGE_KEYS", f"{KEYS_FOLDER}/keys"),
        env("ETUDE_EDGE_MAX_SANDBOXES", str(edge.max_sandboxes)),
    ]
    if pool.spec.slot.memory_mib is not None:
        variables.append(env("ETUDE_EDGE_MEMORY_MIB", str(pool.spec.slot.memory_mib)))
    if pool.spec.slot.disk_mib is not None:
        variables.append(env("ETUDE_EDGE_DISK_MIB", str(pool.spec.slot.disk_mib)))
    if edge.tls_ref is not None:
        variables.append(env("ETUDE_EDGE_TLS", certificates.SERVING_TLS))
    if edge.workspace is not None:
        variables.append(env("ETUDE_EDGE_WORKSPACE", edge.workspace))
    return RolePod(
        role=names.ENVIRONMENT_API,
        image=image,
        command=COMMANDS[names.ENVIRONMENT_API],
        ports=PORTS[names.ENVIRONMENT_API],
        env=variables,
        grace_s=API_GRACE_S,
        files=PodFiles(
            keys_secret=edge.keys_ref.name, folders=certificates.serving_tls(edge.tls_ref)
        ),
    )
