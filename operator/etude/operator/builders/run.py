"""Children of a run: ConfigMap, pools, workloads, Services, certificates and policies."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from etude.common.api.kinds import RLRun
from etude.common.api.meta import API_VERSION
from etude.common.api.pool.autoscaling import ScalingMode
from etude.common.api.run.roles import EnvironmentRole
from etude.common.role_inputs import ResolvedRun, ResumeAt
from etude.operator import names
from etude.operator.builders import certificates, network_policies, pod_overrides
from etude.operator.builders.addresses import PORTS, broker_service, role_address
from etude.operator.builders.http_route import route_objects
from etude.operator.builders.jobset import job_set
from etude.operator.builders.kuberay import ray_cluster
from etude.operator.builders.kueue import NodeFlavor, QueuePriority, workload
from etude.operator.builders.platform import COMMANDS, Platform, traces_env
from etude.operator.builders.pod import (
    SPEC_FOLDER,
    PodCertificate,
    PodFiles,
    PodPlacement,
    PodResources,
    RolePod,
    TemplateOverrides,
    base_env,
    env,
    toleration,
)
from etude.operator.builders.run_spec import (
    desired_pods,
    has_stateful_set,
    least_pods,
    pods_by_role,
    pool_name,
    resolved_spec,
    role_spec,
    run_labels,
)
from etude.operator.builders.volcano import pod_group_name, pod_groups
from etude.operator.builders.workload import (
    ReplicatedRole,
    canonical_json,
    config_map,
    disruption_budget,
    object_head,
    pod_template,
    service,
    stateful_set,
)
from etude.operator.manifests import Manifest, stamp_digest

_SIZING = ("autoscaling", "minIdle", "overcommitFactor")
"""Fields that keep hosts without demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """Decisions about a run that shape its children."""

    images: Mapping[str, str]
    """Default images, as they were when the run was accepted."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """By role; 0 unless the role was restarted."""
    engines: int | None = None
    """Surplus engines to keep for now; None for as many as desired."""
    is_running: bool = True
    """False keeps the objects and releases the pods."""
    is_queued: bool = False
    """The run waits in a queue, which needs its workload to admit it."""
    has_workload: bool = False
    """The run has a Kueue Workload: from waiting for quota until it needs none."""
    priority: QueuePriority | None = None
    """Priority in the queue."""
    flavors: Mapping[str, NodeFlavor] = field(default_factory=dict)
    """Node constraints of the admission, by role."""


def run_children(run: RLRun, shape: RunShape, platform: Platform) -> list[Manifest]:
    """Everything that a run owns except its checkpoints, in the order to apply it."""
    is_sampling = shape.is_running and run.status.released is None
    children = [_run_map(run), *own_pools(run, is_running=is_sampling)]
    if run.spec.roles.inference is not None:
        children.append(_engine_budget(run))
    if shape.is_running or shape.is_queued:
        children += pod_groups(run, run_labels(run), least_pods(run))
    for role in pods_by_role(run):
        children += _role_objects(run, role, shape, platform)
    children += route_objects(run, {**run_labels(run), names.ROLE: names.INFERENCE})
    if shape.is_running or shape.is_queued:
        children += _fixed_workload(run, shape, platform)
    if run.spec.scheduling.admission == "Workload" and shape.has_workload:
        parts = _replicated_roles(run, replace(shape, flavors={}), platform)
        children.append(workload(run, run_labels(run), parts, shape.priority))
    children += [*_policies(run, platform), *_certificates(run, platform)]
    return [stamp_digest(child) for child in children]


def _fixed_workload(run: RLRun, shape: RunShape, platform: Platform) -> list[Manifest]:
    """The JobSet or RayCluster of the run, which exists while its pods are desired."""
    match run.spec.scheduling.kind:
        case "JobSet":
            return [job_set(run, run_labels(run), _replicated_roles(run, shape, platform))]
        case "RayCluster":
            return [
                ray_cluster(
                    run, run_labels(run), _replicated_role(run, names.TRAINER, shape, platform)
                )
            ]
        case "StatefulSet":
            return []


def _role_objects(run: RLRun, role: str, shape: RunShape, platform: Platform) -> list[Manifest]:
    """The headless Service of a role and, unless the run has one workload, its StatefulSet."""
    name = names.child(run.metadata.name, role)
    labels = {**run_labels(run), names.ROLE: role}
    headless = service(run, name, labels, PORTS[role])
    if not has_stateful_set(run, role):
        return [headless]
    pod = _run_pod(run, role, shape, platform)
    kept = shape.engines if role == names.INFERENCE else None
    count = desired_pods(run)[role]
    pods = (kept or count) if shape.is_running and count else 0
    attempt = shape.attempts.get(role, 0)
    return [headless, stateful_set(run, name, labels, pod, replicas=pods, attempt=attempt)]


def _replicated_roles(run: RLRun, shape: RunShape, platform: Platform) -> list[ReplicatedRole]:
    return [_replicated_role(run, role, shape, platform) for role in pods_by_role(run)]


def _replicated_role(run: RLRun, role: str, shape: RunShape, platform: Platform) -> ReplicatedRole:
    labels = {**run_labels(run), names.ROLE: role}
    pod = _run_pod(run, role, shape, platform)
    template = pod_template(labels, pod, shape.attempts.get(role, 0))
    return ReplicatedRole(
        role, names.child(run.metadata.name, role), pods_by_role(run)[role], template
    )


def _policies(run: RLRun, platform: Platform) -> list[Manifest]:
    if platform.namespace is None or run.spec.network.policy == "Unmanaged":
        return []
    pools = [pool_name(run, role) for role in run.spec.roles.environments]
    asks = certificates.asks_issuer(platform.tls)
    return network_policies.run_policies(run, pools, platform.namespace, asks_issuer=asks)


def _certificates(run: RLRun, platform: Platform) -> list[Manifest]:
    if platform.tls is None:
        return []
    identities = [certificates.run_identity(platform.tls, run, role) for role in pods_by_role(run)]
    return certificates.certificate_objects(run, platform.tls, identities)


def _certificate(run: RLRun, role: str, platform: Platform) -> PodCertificate | None:
    if platform.tls is None:
        return None
    identity = certificates.run_identity(platform.tls, run, role)
    return certificates.pod_certificate(platform.tls, identity)


def _resume_at(run: RLRun) -> ResumeAt | None:
    decision = run.status.resumption
    if decision is None or not decision.number:
        return None
    return ResumeAt(number=decision.number, step=decision.step, branch=decision.branch)


def own_pools(run: RLRun, *, is_running: bool) -> list[Manifest]:
    """The pools that the run owns; without hosts while the run holds no pods."""
    return [
        own_pool(run, run_labels(run), role, is_running=is_running)
        for role in run.spec.roles.environments
        if role.pool_template is not None
    ]


def _run_map(run: RLRun) -> Manifest:
    resolved = ResolvedRun(
        name=run.metadata.name,
        namespace=run.metadata.namespace,
        uid=run.metadata.uid,
        generation=run.metadata.generation,
        spec=resolved_spec(run),
        resume=_resume_at(run),
    )
    name = names.child(run.metadata.name, "run")
    return config_map(run, name, run_labels(run), {"run.json": resolved.to_json()})


def _engine_budget(run: RLRun) -> Manifest:
    labels = {**run_labels(run), names.ROLE: names.INFERENCE}
    name = names.child(run.metadata.name, names.INFERENCE)
    limit = {"minAvailable": max(1, pods_by_role(run)[names.INFERENCE] - 1)}
    return disruption_budget(run, name, labels, limit)


def _run_pod(run: RLRun, role: str, shape: RunShape, platform: Platform) -> RolePod:
    spec = role_spec(run, role)
    secret = run.spec.storage.secret_ref
    flavor = shape.flavors.get(role, NodeFlavor())
    return RolePod(
        role=role,
        image=spec.image or shape.images[role],
        command=COMMANDS[role],
        ports=PORTS[role],
        env=[
            *base_env(PORTS[role], attempt=shape.attempts.get(role, 0)),
            env("ETUDE_RUN_FILE", f"{SPEC_FOLDER}/run.json"),
            *traces_env(platform),
            *_peer_env(run, role, shape),
            *(env(item.name, item.value) for item in spec.env),
        ],
        secret=secret.name if secret is not None else None,
        more_secrets=_more_secrets(run, role),
        grace_s=pod_overrides.termination_grace_s(run, role, spec),
        certificate=_certificate(run, role, platform),
        resources=PodResources(
            cpu=spec.cpu,
            memory=spec.memory,
            gpus=spec.gpus_per_replica,
            gpu_resource=spec.gpu_resource,
            claims=spec.resource_claims,
        ),
        files=PodFiles(
            spec_map=names.child(run.metadata.name, "run"),
            shared_memory=role in {names.TRAINER, names.INFERENCE},
        ),
        placement=PodPlacement(
            node_selector={**spec.node_selector, **flavor.node_selector},
            tolerations=[*map(toleration, spec.tolerations), *flavor.tolerations],
            affinity=pod_overrides.pod_affinity(run, {**run_labels(run), names.ROLE: role}),
            classes=pod_overrides.pod_classes(run, spec),
            pod_group=pod_group_name(run, role),
        ),
        overrides=TemplateOverrides(
            labels=flavor.labels,
            annotations=flavor.annotations,
            patch=pod_overrides.template_patch(spec.pod_template),
        ),
    )


def _more_secrets(run: RLRun, role: str) -> list[str]:
    """Only the trainer asks a hub of models and only rewards ask a judge: each has one key."""
    rewards = run.spec.roles.rewards
    secret = {
        names.TRAINER: run.spec.model.secret_ref,
        names.REWARDS: rewards.secret_ref if rewards is not None else None,
    }.get(role)
    return [secret.name] if secret is not None else []


def _peer_env(run: RLRun, role: str, shape: RunShape) -> list[Manifest]:
    match role:
        case names.TRAINER:
            return [*_engine_env(run), *_broker_env(run), *_rewards_env(run)]
        case names.INFERENCE:
            return [env("ETUDE_HTTP_PORT", str(PORTS[names.INFERENCE]["http"]))]
        case _:
            return _broker_env(run)


def _engine_env(run: RLRun) -> list[Manifest]:
    role = run.spec.roles.inference
    # Up to the maximum: the controller reads this once.
    replicas = 0 if role is None else role.most_replicas
    targets = [role_address(run, names.INFERENCE, ordinal) for ordinal in range(replicas)]
    return [env("ETUDE_INFERENCE_TARGETS", ",".join(targets))] if targets else []


def _rewards_env(run: RLRun) -> list[Manifest]:
    if run.spec.roles.rewards is None:
        return []
    return [env("ETUDE_REWARDS_TARGET", role_address(run, names.REWARDS))]


def _broker_env(run: RLRun) -> list[Manifest]:
    targets = {
        role.name: broker_service(pool_name(run, role)) for role in run.spec.roles.environments
    }
    return [env("ETUDE_BROKERS", canonical_json(targets))] if targets else []


def own_pool(
    run: RLRun, labels: Mapping[str, str], role: EnvironmentRole, *, is_running: bool
) -> Manifest:
    """The pool of one environment; without hosts while the run does not need it."""
    template = role.pool_template
    assert template is not None, f"{role.name} refers to a pool"  # noqa: S101 - our own mistake
    access = run.spec.storage.to_json()
    del access["uri"]
    # Its store has the access settings of the run's, unless it sets its own.
    spec = ({"store": access} if access else {}) | template.to_json()
    given = template.observability.to_json()
    spec["observability"] = run.spec.observability.to_json() | given
    if template.mode is ScalingMode.EXTERNAL:
        spec.pop("replicas", None)  # owned by the external autoscaler
    spec = _without_empty(spec)
    if not is_running:
        released = {name: value for name, value in spec.items() if name not in _SIZING}
        spec = released | {"replicas": 0}
    name = names.own_pool(run.metadata.name, role.name)
    return {**object_head(run, API_VERSION, "EnvPool", name, labels), "spec": spec}


def _without_empty(value: Manifest) -> Manifest:
    """The mapping without empty mappings in it.

    Server-side apply turns a mapping whose keys all go into null, which the schemas of our kinds
    refuse: the mapping itself must not be sent.
    """
    inner = {
        key: _without_empty(each) if isinstance(each, dict) else each for key, each in value.items()
    }
    return {key: each for key, each in inner.items() if each != {}}
