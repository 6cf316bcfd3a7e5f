"""Where each field of the API must show: the expressions that read it."""

import runpy
from collections.abc import Iterator
from pathlib import Path

OPERATOR = "etude.operator"
TRAINER = "etude.trainer"
CONTROLLER = "etude.trainer.controller"
NODE = "etude.envserver.host"
BROKER = "etude.envserver.broker"
PEOPLE = "people"


def under(prefix: str, readers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The same readers for fields that several owners share."""
    for name, reader in readers.items():
        yield f"{prefix}.{name}" if name else prefix, reader


SIZE = ("image", "cpu", "memory", "nodeSelector")


def pods(builder: str, owner: str, classes: str, grace: str) -> dict[str, str]:
    """The readers of the fields of a role's pods."""
    return {
        **dict.fromkeys(
            ("image", "gpusPerReplica", "cpu", "memory", "nodeSelector", "gpuResource"),
            f"{builder} {owner}",
        ),
        "env[].name": f"{builder} item",
        "env[].value": f"{builder} item",
        "resourceClaims[].name": f"{OPERATOR}.builders.pod claim",
        "resourceClaims[].resourceClaimTemplateName": f"{OPERATOR}.builders.pod claim",
        **TOLERATIONS,
        "priorityClassName": classes,
        "runtimeClassName": classes,
        **{
            f"podTemplate.{name}": f"{OPERATOR}.builders.pod_overrides given"
            for name in ("labels", "annotations", "spec")
        },
        "terminationGracePeriodSeconds": grace,
    }


TOLERATIONS = {
    f"tolerations[].{name}": f"{OPERATOR}.builders.pod toleration"
    for name in ("key", "operator", "value", "effect")
}
OVERRIDES = f"{OPERATOR}.builders.pod_overrides spec"
ROLE = pods(f"{OPERATOR}.builders.run", "spec", OVERRIDES, OVERRIDES)
RELEASE = "etude.feedback.release"
ROUTE_PARTS = f"{OPERATOR}.builders.route"
CHANNEL = pods(
    ROUTE_PARTS, "engines", f"{ROUTE_PARTS} engines", "etude.common.api.run.role_spec self"
)
ENGINES = {
    "maxModelLen": "etude.inference.settings role",
    "maxConcurrent": "etude.inference.settings role",
    "kvCacheMib": "etude.inference.settings role",
    **{
        f"engine.{name}": "etude.inference.engine.arguments settings"
        for name in (
            *("tensorParallel", "pipelineParallel", "dataParallel", "expertParallel"),
            *("memoryShare", "kvCacheDtype", "quantization", "engineArgs", "speculativeTokens"),
        )
    },
    "engine.maxBatchedTokens": "etude.inference.engine.replica options.engine",
}
POOL: dict[str, str] = runpy.run_path(str(Path(__file__).with_name("pool_knobs.py")))["POOL"]
STORAGE = {
    "uri": f"{CONTROLLER}.inputs",
    "endpoint": "etude.common.stores",
    "region": "etude.common.stores",
    "secretRef.name": f"{OPERATOR}.builders.run secret",
}
PUBLISHER = f"{TRAINER}.export.publisher"
SHARE = f"{TRAINER}.export.shard_packer"
ENGINE = "etude.inference.settings"
KEEPER = f"{TRAINER}.compactor.compactor"
WEIGHT_SETTINGS = {
    "codec": PUBLISHER,
    "tileGrid": SHARE,
    "stepsPerVersion": f"{CONTROLLER}.phases.reinforcement",
    "allowNonFinite": PUBLISHER,
    "chainRatio": KEEPER,
    "skips": KEEPER,
    "commit": f"{CONTROLLER}.publishing.engines",
    "commitTimeoutSeconds": f"{CONTROLLER}.publishing.engines",
    "recomputeKv": ENGINE,
    "prefixCache": ENGINE,
    "stickyLag": ENGINE,
    "backlog": f"{CONTROLLER}.phases.reinforcement",
    "undoDepth": ENGINE,
    "auditEvery": ENGINE,
    "retainKeyframes": KEEPER,
    "retainVersions": KEEPER,
}
TASKS = dict.fromkeys(("name", "uri", "environment"), f"{CONTROLLER}.inputs task_set")
EVALUATED = dict.fromkeys(("name", "uri", "environment"), f"{CONTROLLER}.inputs tasks")

RLRUN = {
    "suspend": f"{OPERATOR}.runs.lifecycle.intents",
    "model.uri": "etude.common.api.run.spec self",
    "model.secretRef.name": f"{OPERATOR}.builders.run secret",
    "model.checkpointRef.name": f"{OPERATOR}.runs.observe about",
    "model.addTokens": f"{CONTROLLER}.inputs model",
    "model.chat.template": f"{CONTROLLER}.inputs model.chat",
    "model.seed": f"{CONTROLLER}.lifecycle",
    **dict(under("storage", STORAGE)),
    "phases[].name": f"{CONTROLLER}.program",
    "phases[].type": "etude.common.api.run.phases self",
    "phases[].maxSteps": f"{CONTROLLER}.progress",
    "phases[].seed": f"{CONTROLLER}.inputs",
    "phases[].optimizer.learningRate": f"{TRAINER}.learner.optimiser",
    "phases[].optimizer.schedule": f"{TRAINER}.learner.optimiser",
    "phases[].optimizer.warmupSteps": f"{TRAINER}.learner.optimiser",
    "phases[].optimizer.decayStart": f"{TRAINER}.learner.optimiser",
    "phases[].optimizer.finalFraction": f"{TRAINER}.learner.optimiser",
    "phases[].optimizer.weightDecay": f"{TRAINER}.learner.optimiser settings",
    "phases[].optimizer.gradientClip": f"{TRAINER}.learner.optimiser settings",
    "phases[].optimizer.beta1": f"{TRAINER}.learner.optimiser settings",
    "phases[].optimizer.beta2": f"{TRAINER}.learner.optimiser settings",
    "phases[].optimizer.moments": f"{TRAINER}.learner.optimiser",
    "phases[].optimizer.onNonFinite": f"{TRAINER}.learner.optimiser settings",
    "phases[].optimizer.maxSkippedSteps": f"{TRAINER}.learner.optimiser settings",
    "phases[].optimizer.epsilon": f"{TRAINER}.learner.optimiser settings",
    "phases[].optimizer.expertBiasRate": f"{TRAINER}.learner.routes.balance optimizer",
    "phases[].batchSize": f"{TRAINER}.learner.dataset",
    "roles.trainer.mesh.shard": "etude.common.api.run.roles self",
    "roles.trainer.mesh.replicate": f"{CONTROLLER}.lifecycle mesh",
    "roles.trainer.mesh.context": f"{CONTROLLER}.lifecycle mesh",
    "roles.trainer.mesh.expert": f"{CONTROLLER}.lifecycle mesh",
    "phases[].batchTokens": f"{TRAINER}.learner.data.phase_data",
    "phases[].sequenceTokens": f"{TRAINER}.learner.data.phase_data",
    "phases[].contextExtension.positions": f"{TRAINER}.model.positions extension",
    "phases[].contextExtension.ropeScaling": ("etude.common.api.run.context_extension extension"),
    "phases[].contextExtension.ropeTheta": "etude.common.api.run.context_extension extension",
    "phases[].data[].name": f"{TRAINER}.learner.dataset dataset",
    "phases[].data[].uri": f"{TRAINER}.learner.dataset dataset",
    "phases[].data[].contextWeight": f"{TRAINER}.learner.data.encoding dataset",
    "phases[].data[].weight": f"{TRAINER}.learner.data.phase_data each",
    "phases[].validation.data[].name": f"{TRAINER}.learner.data.phase_data dataset",
    "phases[].validation.data[].uri": f"{TRAINER}.learner.data.phase_data dataset",
    "phases[].validation.data[].contextWeight": f"{TRAINER}.learner.data.encoding dataset",
    "phases[].validation.everySteps": f"{TRAINER}.controller.phases.supervised",
    "phases[].validation.maxTokens": f"{TRAINER}.learner.data.phase_data",
    "phases[].mtp.lossWeight": f"{TRAINER}.learner.guesses",
    "phases[].routerReplay.mode": f"{TRAINER}.learner.routes.replay",
    "phases[].routerReplay.plausibility": f"{TRAINER}.learner.routes.replay settings",
    "phases[].curriculum.name": f"{TRAINER}.controller.admission.task_choice chosen",
    "phases[].curriculum.parameters": f"{TRAINER}.controller.admission.task_choice chosen",
    "phases[].profile.firstStep": f"{TRAINER}.learner.step_profiler wanted",
    "phases[].profile.numSteps": f"{TRAINER}.learner.step_profiler wanted",
    **dict(under("phases[].tasks[]", TASKS)),
    "phases[].algorithm.name": f"{TRAINER}.algorithms.registry",
    "phases[].algorithm.groupSize": f"{CONTROLLER}.phases.reinforcement",
    "phases[].algorithm.promptsPerStep": f"{CONTROLLER}.phases.reinforcement",
    "phases[].algorithm.parameters": f"{TRAINER}.algorithms.registry",
    "phases[].feedback.uri": f"{CONTROLLER}.phases.feedback source",
    "phases[].feedback.minRollouts": f"{CONTROLLER}.admission.windows source",
    "phases[].feedback.maxAgeSeconds": f"{CONTROLLER}.admission.windows source",
    "phases[].feedback.klBudget": f"{CONTROLLER}.phases.feedback source",
    "phases[].feedback.stepsPerWindow": f"{CONTROLLER}.phases.feedback source",
    "phases[].feedback.maxTokens": f"{TRAINER}.learner.phase",
    "phases[].asyncLimits.mode": f"{CONTROLLER}.phases.guards limits",
    "phases[].asyncLimits.maxStalenessVersions": f"{CONTROLLER}.phases.reinforcement limits",
    "phases[].asyncLimits.onStale": f"{CONTROLLER}.phases.reinforcement limits",
    "phases[].rollout.toolset": f"{TRAINER}.rollouts.worker limits",
    "phases[].rollout.toolFormat": f"{TRAINER}.rollouts.worker limits",
    "phases[].rollout.maxConcurrent": f"{TRAINER}.ray_backend limits",
    "phases[].rollout.concurrency.min": f"{CONTROLLER}.publishing.concurrency",
    "phases[].rollout.concurrency.max": f"{CONTROLLER}.publishing.concurrency",
    **{
        f"phases[].rollout.{name}": f"{TRAINER}.rollouts.protocol limits"
        for name in ("maxTurns", "maxTurnTokens", "maxTokens", "timeoutSeconds")
    },
    "phases[].rollout.summaries.contextTokens": f"{TRAINER}.rollouts.protocol summaries",
    "phases[].rollout.summaries.maxTokens": f"{TRAINER}.rollouts.protocol summaries",
    "phases[].rollout.retries": f"{TRAINER}.rollouts.group_runner limits",
    "phases[].rollout.maxInfraFailurePercent": f"{CONTROLLER}.phases.guards limits",
    **{
        f"phases[].successPolicy.{name}": f"{CONTROLLER}.phases.targets policy"
        for name in ("metric", "op", "value", "windowSteps")
    },
    **{
        f"phases[].gate.{name}": f"{CONTROLLER}.phases.targets gate"
        for name in ("evaluation", "metric", "op", "value", "onFail")
    },
    **{
        f"phases[].monitors[].{name}": f"{CONTROLLER}.reporting.monitoring each"
        for name in ("name", "action", "penalty", "afterStep")
    },
    **dict(under("roles.trainer", ROLE)),
    "roles.trainer.learnerRanks": f"{CONTROLLER}.lifecycle",
    "roles.trainer.rolloutWorkers": f"{CONTROLLER}.lifecycle",
    "roles.trainer.threadsPerRank": f"{CONTROLLER}.lifecycle",
    "roles.trainer.microBatchTokens": f"{CONTROLLER}.lifecycle",
    "roles.trainer.packing": f"{CONTROLLER}.lifecycle",
    "roles.trainer.activationCheckpointing": f"{CONTROLLER}.lifecycle",
    "roles.trainer.compileBlocks": f"{CONTROLLER}.lifecycle",
    "roles.trainer.lora.rank": f"{TRAINER}.model.lora settings",
    "roles.trainer.lora.alpha": "etude.common.api.run.roles self",
    "roles.trainer.lora.targetModules": f"{TRAINER}.model.lora settings",
    "roles.trainer.cpuOffload": f"{CONTROLLER}.lifecycle",
    **dict(under("roles.inference", ROLE)),
    "roles.inference.replicas": f"{OPERATOR}.builders.run_spec role",
    "roles.inference.minReplicas": "etude.common.api.run.roles self",
    "roles.inference.maxReplicas": "etude.common.api.run.roles self",
    "roles.inference.autoscaling.mode": f"{OPERATOR}.runs.capacity.engine_count",
    "roles.inference.autoscaling.targetStepSeconds": f"{OPERATOR}.runs.capacity.engine_count",
    **dict(under("roles.inference", ENGINES)),
    "roles.inference.evaluationReplicas": f"{CONTROLLER}.lifecycle role",
    "roles.environments[].name": f"{OPERATOR}.builders.run role",
    "roles.environments[].poolRef.name": f"{OPERATOR}.builders.run_spec",
    **dict(under("roles.environments[].poolTemplate", POOL)),
    "roles.environments[].template": f"{CONTROLLER}.lifecycle role",
    "roles.inference.gateway.name": f"{OPERATOR}.builders.http_route",
    "roles.inference.gateway.namespace": f"{OPERATOR}.builders.http_route",
    "roles.inference.gateway.sectionName": f"{OPERATOR}.builders.http_route",
    "roles.inference.gateway.hostnames": f"{OPERATOR}.builders.http_route",
    "roles.inference.gateway.proxyNamespace": f"{OPERATOR}.builders.http_route",
    "roles.inference.gateway.requestTimeoutSeconds": f"{OPERATOR}.builders.http_route",
    **dict(under("roles.rewards", ROLE)),
    "roles.rewards.secretRef.name": f"{OPERATOR}.builders.run secret",
    "roles.rewards.functions[].name": "etude.rewards.rubric",
    "roles.rewards.functions[].function": "etude.rewards.rubric",
    "roles.rewards.functions[].weight": "etude.rewards.rubric",
    "roles.rewards.functions[].parameters": "etude.rewards.rubric",
    "roles.rewards.functions[].timeoutSeconds": "etude.common.api.run.roles self",
    "weights.dtype": "etude.inference.settings",
    "weights.timeoutSeconds": f"{CONTROLLER}.lifecycle",
    "weights.encoding": f"{PUBLISHER} _settings",
    "weights.keyframeEverySteps": "etude.common.api.run.weights self",
    "weights.pause": "etude.inference.settings",
    **dict(under("weights.advanced", WEIGHT_SETTINGS)),
    "checkpointing.everySteps": "etude.common.api.run.checkpointing self",
    "checkpointing.everySeconds": f"{CONTROLLER}.checkpoints.cadence",
    "checkpointing.keepLast": f"{OPERATOR}.runs.checkpoints.retention",
    "checkpointing.keepBest.metric": f"{OPERATOR}.runs.checkpoints.retention keep",
    "checkpointing.keepBest.mode": f"{OPERATOR}.runs.checkpoints.retention keep",
    "checkpointing.keepBest.count": f"{OPERATOR}.runs.checkpoints.retention keep",
    "checkpointing.verify": f"{OPERATOR}.runs.checkpoints.registry",
    "checkpointing.resume": f"{OPERATOR}.runs.checkpoints.resume given",
    "checkpointing.resumeFrom.name": f"{OPERATOR}.runs.checkpoints.resume",
    "checkpointing.onFailure": f"{OPERATOR}.runs.lifecycle.final_checkpoint wanted",
    "checkpointing.onSuspend": f"{OPERATOR}.runs.lifecycle.final_checkpoint",
    "checkpointing.timeoutSeconds": f"{CONTROLLER}.checkpoints.manager",
    "evaluation[].name": f"{CONTROLLER}.phases.evaluation",
    **dict(under("evaluation[].tasks", EVALUATED)),
    "evaluation[].phase": f"{CONTROLLER}.phases.evaluation",
    "evaluation[].everySteps": f"{CONTROLLER}.phases.evaluation",
    "evaluation[].limit": f"{CONTROLLER}.phases.evaluation",
    "evaluation[].samples": f"{CONTROLLER}.phases.evaluation",
    "evaluation[].greedy": f"{CONTROLLER}.phases.evaluation",
    "scheduling.workload": "etude.common.api.run.scheduling self",
    "scheduling.admission": f"{OPERATOR}.builders.jobset",
    "scheduling.queueName": f"{OPERATOR}.builders.kueue",
    "scheduling.priorityClassName": f"{OPERATOR}.builders.pod_overrides",
    "scheduling.workloadPriorityClassName": f"{OPERATOR}.runs.capacity.kueue",
    "scheduling.topology.required": f"{OPERATOR}.builders.pod_overrides",
    "scheduling.topology.preferred": f"{OPERATOR}.builders.pod_overrides",
    "scheduling.idleRoles": f"{OPERATOR}.runs.capacity.idle_roles",
    "scheduling.gang.provider": f"{OPERATOR}.integrations.apis",
    "scheduling.gang.scope": f"{OPERATOR}.builders.volcano",
    "scheduling.gang.timeoutSeconds": f"{OPERATOR}.runs.capacity.gangs",
    "managedBy": f"{OPERATOR}.runs.kind",
    "failurePolicy.maxRestarts": f"{OPERATOR}.runs.lifecycle.transitions",
    "failurePolicy.rules[].name": f"{OPERATOR}.runs.lifecycle.failure_policy rule",
    "failurePolicy.rules[].role": f"{OPERATOR}.runs.lifecycle.failure_policy rule",
    "failurePolicy.rules[].cause": f"{OPERATOR}.runs.lifecycle.failure_policy rule",
    "failurePolicy.rules[].exitCodes.op": f"{OPERATOR}.runs.lifecycle.failure_policy codes",
    "failurePolicy.rules[].exitCodes.values": f"{OPERATOR}.runs.lifecycle.failure_policy codes",
    "failurePolicy.rules[].podConditions": f"{OPERATOR}.runs.lifecycle.failure_policy rule",
    "failurePolicy.rules[].action": f"{OPERATOR}.runs.lifecycle.failure_policy rule",
    "network.policy": f"{OPERATOR}.builders.run",
    "budget.gpuHours": f"{OPERATOR}.runs.lifecycle.limits",
    "budget.sandboxHours": f"{OPERATOR}.runs.lifecycle.limits",
    "ttlSecondsAfterFinished": f"{OPERATOR}.runs.lifecycle.cleanup",
    "deletionRules[].after": f"{OPERATOR}.runs.lifecycle.cleanup rule",
    "deletionRules[].policy": f"{OPERATOR}.runs.lifecycle.cleanup rule",
    "deletionRules[].ttlSeconds": f"{OPERATOR}.runs.lifecycle.cleanup rule",
    "failurePolicy.resetAfterSteps": f"{OPERATOR}.runs.bookkeeping",
    "deadlines.preRunningSeconds": f"{OPERATOR}.runs.lifecycle.limits",
    "deadlines.activeSeconds": f"{OPERATOR}.runs.lifecycle.limits",
    "deadlines.stepProgressSeconds": f"{OPERATOR}.runs.lifecycle.limits",
    "observability.otlpEndpoint": f"{CONTROLLER}.lifecycle",
}

CHECKPOINT = {
    "runRef.name": "column Run",
    "runRef.uid": PEOPLE,
    "reason": "column Reason",
    "source.uri": "etude.common.api.kinds",
    "source.manifestDigest": "etude.common.api.kinds",
    **dict(under("storage", STORAGE)),
    **dict.fromkeys(
        ("step", "policyVersion", "keyframe", "sizeBytes", "metrics"), "etude.common.api.kinds spec"
    ),
    "branch": "etude.common.api.kinds spec",
    "parentRef.name": PEOPLE,
    "pinned": f"{OPERATOR}.runs.checkpoints.retention",
    "verify": f"{OPERATOR}.checkpoints.decide",
    "deletionPolicy": f"{OPERATOR}.checkpoints.decide",
}

KNOBS = {"RLRun": RLRUN, "Checkpoint": CHECKPOINT, "EnvPool": POOL}
"""By kind: field path below spec → module that reads it, and from which name where that is not the
parent's own: `settings` for `settings.beta1`, which would be `optimizer.beta1`. `column` and a name
stand for a figure that kubectl shows; PEOPLE for one that it shows in full only."""
