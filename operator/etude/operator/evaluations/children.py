"""Children of an evaluation: ConfigMap, engines, reward service, Job, certificates and policies."""

from dataclasses import dataclass
from typing import Any

from etude.common.api.checkpoint.spec import CheckpointSource
from etude.common.api.kinds import EvalRun, RLRun
from etude.common.api.run.role_spec import RoleSpec
from etude.common.api.run.roles import EnvironmentRole
from etude.common.api.storage import Storage
from etude.common.process import EXIT_CONFIGURATION
from etude.common.role_inputs import ResolvedEvaluation, ResolvedRun
from etude.operator import names
from etude.operator.builders import certificates, network_policies, pod_overrides
from etude.operator.builders.addresses import PORTS, broker_service
from etude.operator.builders.platform import COMMANDS, Platform, traces_env
from etude.operator.builders.pod import (
    SCRATCH_FOLDER,
    SPEC_FOLDER,
    PodCertificate,
    PodFiles,
    PodPlacement,
    PodResources,
    RolePod,
    TemplateOverrides,
    base_env,
    env,
    job_spec,
    toleration,
)
from etude.operator.builders.run_spec import pool_name, resolved_spec, role_spec
from etude.operator.builders.workload import (
    canonical_json,
    config_map,
    object_head,
    owner_labels,
    service,
    stateful_set,
)
from etude.operator.manifests import Manifest, Ref, stamp_digest

COMMAND = ("python", "-m", "etude.trainer.commands.evaluate_checkpoint")
RESULT_FILE = "/dev/termination-log"
"""Default of Kubernetes for terminationMessagePath."""
DRIVER_CPU = "500m"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationInputs:
    """Objects that an accepted evaluation refers to."""

    run: RLRun
    """The run that wrote the checkpoint, or whose rewards and store are used."""
    source: CheckpointSource | None
    """The checkpoint's state; None for a model at an endpoint."""
    baseline: Storage | None = None
    """Results to compare with."""


def _served_roles(evaluation: EvalRun) -> tuple[str, ...]:
    """Roles with StatefulSets, which are deleted when the evaluation is over."""
    is_at_endpoint = evaluation.spec.endpoint is not None
    return (names.REWARDS,) if is_at_endpoint else (names.INFERENCE, names.REWARDS)


def results_storage(evaluation: EvalRun, run: RLRun) -> Storage:
    """Location of the results: in the run's store, under a name that no other evaluation has."""
    storage, metadata = run.spec.storage, evaluation.metadata
    prefix = f"{storage.uri.rstrip('/')}/evaluations/{metadata.name}-{metadata.uid[:8]}"
    return storage.model_copy(update={"uri": prefix})


def job_ref(evaluation: EvalRun) -> Ref:
    """Identity of the Job of an evaluation."""
    name = names.child(evaluation.metadata.name, names.EVALUATOR)
    return Ref("Job", evaluation.metadata.namespace, name)


def evaluation_children(
    evaluation: EvalRun, inputs: EvaluationInputs, platform: Platform
) -> list[Manifest]:
    """Everything that an evaluation owns, in the order to create it: the Job is the last."""
    run = inputs.run
    children = [_input_map(evaluation, inputs)]
    for role in _served_roles(evaluation):
        name = names.child(evaluation.metadata.name, role)
        labels = {**owner_labels(evaluation), names.ROLE: role}
        children.append(service(evaluation, name, labels, PORTS[role]))
        count = evaluation.spec.engines if role == names.INFERENCE else 1
        pod = _served_pod(evaluation, inputs, role, platform)
        children.append(stateful_set(evaluation, name, labels, pod, replicas=count, attempt=0))
    if platform.namespace is not None and run.spec.network.policy != "Unmanaged":
        asks = certificates.asks_issuer(platform.tls)
        children += network_policies.evaluation_policies(
            evaluation, run, platform.namespace, asks_issuer=asks
        )
    children += _certificates(evaluation, platform)
    children.append(_job(evaluation, inputs, platform))
    return [stamp_digest(child) for child in children]


def _input_map(evaluation: EvalRun, inputs: EvaluationInputs) -> Manifest:
    """The inputs of the three roles.

    Engines read the run as it is. The reward service leases environments for the evaluation, whose
    uid and environments it has.
    """
    run = inputs.run
    resolved = ResolvedRun(
        name=run.metadata.name,
        namespace=run.metadata.namespace,
        uid=run.metadata.uid,
        spec=resolved_spec(run),
    )
    named = _environments(evaluation, run)
    roles = resolved.spec.roles.model_copy(update={"environments": named})
    graded = resolved.model_copy(
        update={
            "name": evaluation.metadata.name,
            "uid": evaluation.metadata.uid,
            "spec": resolved.spec.model_copy(update={"roles": roles}),
        }
    )
    ordered = ResolvedEvaluation(
        name=evaluation.metadata.name,
        uid=evaluation.metadata.uid,
        spec=evaluation.spec,
        run=resolved,
        checkpoint=inputs.source,
        results=results_storage(evaluation, run).uri,
        baseline=inputs.baseline.uri if inputs.baseline is not None else None,
    )
    engines = {"inference.json": resolved.to_json()} if inputs.source is not None else {}
    files = {
        **engines,
        "rewards.json": graded.to_json(),
        "evaluation.json": ordered.to_json(),
    }
    name = names.child(evaluation.metadata.name, "evaluation")
    return config_map(evaluation, name, owner_labels(evaluation), files)


def _environments(evaluation: EvalRun, run: RLRun) -> tuple[EnvironmentRole, ...]:
    """The evaluation's environments, and those others of the run that its phases name."""
    ours = [
        EnvironmentRole(name=each.name, pool_ref=each.pool_ref, template=each.template)
        for each in evaluation.spec.environments
    ]
    known = {each.name for each in ours}
    return (*ours, *(each for each in run.spec.roles.environments if each.name not in known))


def _brokers_env(evaluation: EvalRun, inputs: EvaluationInputs) -> Manifest:
    targets = {
        each.name: broker_service(pool_name(inputs.run, each))
        for each in _environments(evaluation, inputs.run)
    }
    return env("ETUDE_BROKERS", canonical_json(targets))


def _served_pod(
    evaluation: EvalRun, inputs: EvaluationInputs, role: str, platform: Platform
) -> RolePod:
    """A pod of the run's own description of that role."""
    run = inputs.run
    spec = role_spec(run, role)
    peers = (
        [env("ETUDE_HTTP_PORT", str(PORTS[names.INFERENCE]["http"]))]
        if role == names.INFERENCE
        else [_brokers_env(evaluation, inputs)]
    )
    return RolePod(
        role=role,
        image=_image(run, role, platform),
        command=COMMANDS[role],
        ports=PORTS[role],
        env=[
            *base_env(PORTS[role], attempt=0),
            env("ETUDE_RUN_FILE", f"{SPEC_FOLDER}/{role}.json"),
            *traces_env(platform),
            *peers,
            *(env(item.name, item.value) for item in spec.env),
        ],
        grace_s=spec.grace_s,
        resources=PodResources(
            cpu=spec.cpu,
            memory=spec.memory,
            gpus=spec.gpus_per_replica,
            gpu_resource=spec.gpu_resource,
            claims=spec.resource_claims,
        ),
        overrides=TemplateOverrides(patch=pod_overrides.template_patch(spec.pod_template)),
        more_secrets=_judge_secret(run) if role == names.REWARDS else (),
        **_common(evaluation, run, role, platform, placed_as=spec),
    )


def _common(
    evaluation: EvalRun, run: RLRun, role: str, platform: Platform, *, placed_as: RoleSpec
) -> dict[str, Any]:
    """Fields that all pods of an evaluation have: inputs, store, certificate, placement."""
    secret = run.spec.storage.secret_ref
    return {
        "secret": secret.name if secret is not None else None,
        "certificate": _certificate(evaluation, role, platform),
        "files": PodFiles(
            spec_map=names.child(evaluation.metadata.name, "evaluation"),
            shared_memory=role == names.INFERENCE,
        ),
        "placement": PodPlacement(
            node_selector=placed_as.node_selector,
            tolerations=[toleration(each) for each in placed_as.tolerations],
            classes=pod_overrides.pod_classes(run, placed_as),
        ),
    }


def _engine_targets(evaluation: EvalRun) -> str:
    """Addresses of the engines, with commas; empty where an endpoint answers."""
    if evaluation.spec.endpoint is not None:
        return ""
    engines = names.child(evaluation.metadata.name, names.INFERENCE)
    port = PORTS[names.INFERENCE]["grpc"]
    return ",".join(names.address(engines, port, n) for n in range(evaluation.spec.engines))


def _job(evaluation: EvalRun, inputs: EvaluationInputs, platform: Platform) -> Manifest:
    """The Job that drives the rollouts, on nodes of the reward service's kind."""
    run, role = inputs.run, names.EVALUATOR
    name = evaluation.metadata.name
    endpoint = evaluation.spec.endpoint
    secret = endpoint.secret_ref if endpoint is not None else None
    rewards = names.address(names.child(name, names.REWARDS), PORTS[names.REWARDS]["grpc"])
    pod = RolePod(
        role=role,
        # Of this operator's release, whatever the run's: it reads what the operator writes.
        image=run.spec.roles.trainer.image or platform.images[names.TRAINER],
        command=COMMAND,
        ports={},
        env=[
            env("HOME", SCRATCH_FOLDER),
            env("ETUDE_EVALUATION_FILE", f"{SPEC_FOLDER}/evaluation.json"),
            env("ETUDE_RESULT_FILE", RESULT_FILE),
            env("ETUDE_INFERENCE_TARGETS", _engine_targets(evaluation)),
            env("ETUDE_REWARDS_TARGET", rewards),
            _brokers_env(evaluation, inputs),
        ],
        resources=PodResources(cpu=DRIVER_CPU),
        more_secrets=() if secret is None else (secret.name,),
        **_common(evaluation, run, role, platform, placed_as=role_spec(run, names.REWARDS)),
    )
    labels = owner_labels(evaluation)
    spec = job_spec(pod, labels, {})
    # Evictions and drains are no failures; what a repetition would not cure is not repeated.
    spec["podFailurePolicy"] = {
        "rules": [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {
                "action": "FailJob",
                "onExitCodes": {
                    "containerName": role,
                    "operator": "In",
                    "values": [EXIT_CONFIGURATION],
                },
            },
        ]
    }
    spec["activeDeadlineSeconds"] = evaluation.spec.timeout_seconds
    head = object_head(evaluation, "batch/v1", "Job", job_ref(evaluation).name, labels)
    return {**head, "spec": spec}


def _image(run: RLRun, role: str, platform: Platform) -> str:
    """The image with which the run samples and grades."""
    pinned = run.status.resolved.images if run.status.resolved is not None else {}
    return role_spec(run, role).image or pinned.get(role, platform.images[role])


def _judge_secret(run: RLRun) -> list[str]:
    rewards = run.spec.roles.rewards
    secret = rewards.secret_ref if rewards is not None else None
    return [secret.name] if secret is not None else []


def _certificate(evaluation: EvalRun, role: str, platform: Platform) -> PodCertificate | None:
    if platform.tls is None:
        return None
    identity = certificates.run_identity(platform.tls, evaluation, role)
    return certificates.pod_certificate(platform.tls, identity)


def _certificates(evaluation: EvalRun, platform: Platform) -> list[Manifest]:
    if platform.tls is None:
        return []
    tls = platform.tls
    parts = [
        certificates.run_identity(tls, evaluation, role)
        for role in (*_served_roles(evaluation), names.EVALUATOR)
    ]
    return certificates.certificate_objects(evaluation, tls, parts)
