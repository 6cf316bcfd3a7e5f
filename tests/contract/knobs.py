"""Where each field of the API must show: the modules that read it."""

from collections.abc import Iterator

OPERATOR = "etude.operator"
TRAINER = "etude.trainer"
CONTROLLER = "etude.trainer.controller"
NODE = "etude.envserver.node"
BROKER = "etude.envserver.broker"


def under(prefix: str, readers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The same readers for fields that several owners share."""
    for name, reader in readers.items():
        yield f"{prefix}.{name}" if name else prefix, reader


ROLE = {
    "image": f"{OPERATOR}.desired",
    "gpusPerReplica": f"{OPERATOR}.desired",
    "cpu": f"{OPERATOR}.desired",
    "memory": f"{OPERATOR}.desired",
    "env[].name": f"{OPERATOR}.desired",
    "env[].value": f"{OPERATOR}.desired",
    "nodeSelector": f"{OPERATOR}.desired",
    "terminationGracePeriodSeconds": f"{OPERATOR}.desired",
}
POOL = {
    "templates[].name": f"{NODE}.serve",
    "templates[].trust": f"{NODE}.admission",
    "isolation.minimum": f"{NODE}.admission",
    "replicas": f"{OPERATOR}.desired",
    "slotsPerReplica": f"{NODE}.serve",
    "lease.ttlSeconds": f"{BROKER}.broker",
    "lease.maxQueue": f"{BROKER}.broker",
    "lease.queueTimeoutSeconds": f"{BROKER}.broker",
    "store.endpoint": "etude.common.files",
    "store.region": "etude.common.files",
    "store.secretRef.name": f"{OPERATOR}.desired",
}
STORAGE = {
    "uri": f"{CONTROLLER}.inputs",
    "endpoint": "etude.common.files",
    "region": "etude.common.files",
    "secretRef.name": f"{OPERATOR}.desired",
}
TASKS = {
    "name": f"{CONTROLLER}.inputs",
    "uri": f"{CONTROLLER}.inputs",
    "environment": f"{CONTROLLER}.inputs",
}

RLRUN = {
    "suspend": f"{OPERATOR}.intents",
    "model.uri": f"{CONTROLLER}.inputs",
    "model.seed": f"{CONTROLLER}.host",
    **dict(under("storage", STORAGE)),
    "phases[].name": f"{CONTROLLER}.program",
    "phases[].type": "etude.common.api.phases",
    "phases[].maxSteps": f"{CONTROLLER}.run",
    "phases[].seed": f"{CONTROLLER}.inputs",
    "phases[].optimizer.learningRate": f"{TRAINER}.schedule",
    "phases[].optimizer.schedule": f"{TRAINER}.schedule",
    "phases[].optimizer.warmupSteps": f"{TRAINER}.schedule",
    "phases[].optimizer.decayStart": f"{TRAINER}.schedule",
    "phases[].optimizer.finalFraction": f"{TRAINER}.schedule",
    "phases[].optimizer.weightDecay": f"{TRAINER}.optimiser",
    "phases[].optimizer.gradientClip": f"{TRAINER}.optimiser",
    "phases[].optimizer.beta1": f"{TRAINER}.optimiser",
    "phases[].optimizer.beta2": f"{TRAINER}.optimiser",
    "phases[].batchSize": f"{TRAINER}.corpus",
    "phases[].data[].name": f"{TRAINER}.corpus",
    "phases[].data[].uri": f"{TRAINER}.corpus",
    "phases[].data[].contextWeight": f"{TRAINER}.corpus",
    **dict(under("phases[].tasks[]", TASKS)),
    "phases[].algorithm.name": f"{TRAINER}.algorithms.choice",
    "phases[].algorithm.groupSize": f"{CONTROLLER}.reinforcement",
    "phases[].algorithm.promptsPerStep": f"{CONTROLLER}.reinforcement",
    "phases[].algorithm.parameters": f"{TRAINER}.algorithms.choice",
    "phases[].asyncLimits.mode": f"{CONTROLLER}.reinforcement",
    "phases[].asyncLimits.maxStalenessVersions": f"{CONTROLLER}.reinforcement",
    "phases[].rollout.toolset": f"{TRAINER}.siblings",
    "phases[].rollout.maxConcurrent": f"{TRAINER}.cluster",
    "phases[].rollout.maxTurns": f"{TRAINER}.siblings",
    "phases[].rollout.maxTurnTokens": f"{TRAINER}.siblings",
    "phases[].rollout.maxTokens": f"{TRAINER}.siblings",
    "phases[].rollout.timeoutSeconds": f"{TRAINER}.siblings",
    "phases[].rollout.retries": f"{TRAINER}.siblings",
    "phases[].rollout.maxInfraFailurePercent": f"{CONTROLLER}.reinforcement",
    **dict(under("roles.trainer", ROLE)),
    "roles.trainer.learnerRanks": f"{CONTROLLER}.host",
    "roles.trainer.rolloutWorkers": f"{CONTROLLER}.host",
    "roles.trainer.threadsPerRank": f"{CONTROLLER}.host",
    "roles.trainer.microBatchTokens": f"{CONTROLLER}.host",
    **dict(under("roles.inference", ROLE)),
    "roles.inference.replicas": f"{OPERATOR}.desired",
    "roles.inference.maxModelLen": "etude.inference.settings",
    "roles.inference.maxConcurrent": "etude.inference.settings",
    "roles.inference.kvCacheMib": "etude.inference.settings",
    "roles.environments[].name": f"{OPERATOR}.desired",
    "roles.environments[].poolRef.name": f"{OPERATOR}.desired",
    **dict(under("roles.environments[].poolTemplate", POOL)),
    "roles.environments[].template": f"{CONTROLLER}.host",
    **dict(under("roles.rewards", ROLE)),
    "roles.rewards.functions[].name": "etude.rewards.rubric",
    "roles.rewards.functions[].function": "etude.rewards.rubric",
    "roles.rewards.functions[].weight": "etude.rewards.rubric",
    "roles.rewards.functions[].parameters": "etude.rewards.rubric",
    "roles.rewards.functions[].timeoutSeconds": "etude.common.api.roles",
    "weights.dtype": "etude.inference.settings",
    "weights.timeoutSeconds": f"{CONTROLLER}.host",
    "weights.keepVersions": f"{CONTROLLER}.publishing",
    "checkpointing.everySteps": f"{CONTROLLER}.run",
    "checkpointing.keepLast": f"{OPERATOR}.registry",
    "checkpointing.onSuspend": f"{OPERATOR}.intents",
    "checkpointing.timeoutSeconds": f"{CONTROLLER}.run",
    "evaluation[].name": f"{CONTROLLER}.evaluation",
    **dict(under("evaluation[].tasks", TASKS)),
    "evaluation[].phase": f"{CONTROLLER}.evaluation",
    "evaluation[].everySteps": f"{CONTROLLER}.evaluation",
    "evaluation[].limit": f"{CONTROLLER}.evaluation",
    "evaluation[].greedy": f"{CONTROLLER}.evaluation",
    "failurePolicy.maxRestarts": f"{OPERATOR}.intents",
    "failurePolicy.resetAfterSteps": f"{OPERATOR}.records",
    "deadlines.preRunningSeconds": f"{OPERATOR}.limits",
    "deadlines.activeSeconds": f"{OPERATOR}.limits",
    "deadlines.stepProgressSeconds": f"{OPERATOR}.limits",
    "observability.otlpEndpoint": f"{CONTROLLER}.host",
}

CHECKPOINT = {
    "runRef.name": f"{OPERATOR}.registry",
    "runRef.uid": f"{OPERATOR}.registry",
    "reason": f"{OPERATOR}.checkpoints",
    "source.uri": f"{OPERATOR}.checkpoints",
    "source.manifestDigest": f"{OPERATOR}.checkpoints",
    **dict(under("storage", STORAGE)),
    "step": f"{OPERATOR}.registry",
    "policyVersion": "column Policy",
    "sizeBytes": "column Size",
    "pinned": f"{OPERATOR}.registry",
    "deletionPolicy": f"{OPERATOR}.checkpoints",
    "metrics": "column Metrics",
}

KNOBS = {"RLRun": RLRUN, "Checkpoint": CHECKPOINT, "EnvPool": POOL}
"""By kind: field path below spec → module that reads it, or `column` and its name for a figure
that only people read."""
