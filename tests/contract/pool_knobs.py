"""Where each field of EnvPool must show, in the form of `knobs.py`."""

OPERATOR = "etude.operator"
NODE = "etude.envserver.host"
BROKER = "etude.envserver.broker"
EGRESS = "etude.envserver.egress.environment_egress"
EGRESS_RULE = {
    "name": f"{EGRESS} each",
    "host": f"{EGRESS} each",
    "port": "etude.common.api.pool.network self",
    "mode": f"{EGRESS} each",
    "methods": f"{EGRESS} each",
    "paths": f"{EGRESS} each",
    "credential.header": "etude.envserver.egress.proxy credential",
    "credential.secretRef.name": f"{OPERATOR}.builders.pool secret_ref",
    "credential.key": "etude.envserver.egress.credentials wanted",
}
POOL = {
    "templates[].name": f"{NODE}.server",
    "templates[].image": "etude.envserver.drivers.selection template",
    "images.sources": f"{BROKER}.launch_admission",
    "images.pullSecretRef.name": f"{OPERATOR}.builders.pool",
    "images.mirrors[].registry": f"{NODE}.server each",
    "images.mirrors[].mirror": f"{NODE}.server each",
    "images.diskMib": f"{NODE}.server",
    "templates[].trust": f"{NODE}.server",
    "templates[].egress": "etude.envserver.drivers.selection template",
    "templates[].warmPerReplica": f"{NODE}.warm_minimum template",
    "warm.shellsPerReplica": f"{NODE}.warm_minimum",
    "warm.maxShellsPerReplica": f"{NODE}.warm_minimum",
    "isolation.minimum": f"{NODE}.server",
    "isolation.driver": "etude.envserver.drivers.selection isolation",
    **{
        f"health.{name}": f"{OPERATOR}.pools.health health"
        for name in ("readinessGraceSeconds", "unschedulableRecheckSeconds", "quarantine")
    },
    "health.crashLoopThreshold": "etude.envserver.drivers.selection health",
    "slot.cpu": f"{OPERATOR}.builders.pool",
    **{
        f"slot.{name}": "etude.envserver.drivers.selection slot"
        for name in (
            *("memoryMib", "diskMib", "processes", "openFiles", "fileMib"),
            "temporaryMib",
        )
    },
    **{f"slot.{name}": f"{NODE}.server slot" for name in ("changeMib", "changeFiles")},
    "snapshotsUri": f"{NODE}.server spec",
    "search.backend": f"{NODE}.workspace_sources",
    "search.models": f"{NODE}.workspace_sources",
    "search.service": f"{NODE}.server",
    "replicas": "etude.common.api.pool.spec self",
    "maxReplicas": f"{OPERATOR}.pools.autoscaling.config spec",
    "minIdle": f"{OPERATOR}.pools.autoscaling.config spec",
    "overcommitFactor": f"{OPERATOR}.pools.autoscaling.config spec",
    **{
        f"autoscaling.{name}": f"{OPERATOR}.pools.autoscaling.config scaling"
        for name in (
            *("mode", "targetUtilizationPercent", "stableWindowSeconds", "panicWindowPercent"),
            *("panicThresholdPercent", "maxScaleUpRate", "maxScaleDownRate"),
            *("scaleDownDelaySeconds", "burstCapacity"),
        )
    },
    "autoscaling.scaleToZero.mode": f"{OPERATOR}.pools.autoscaling.decide zero",
    "autoscaling.scaleToZero.graceSeconds": f"{OPERATOR}.pools.autoscaling.decide zero",
    **{
        f"autoscaling.schedule[].{name}": f"{OPERATOR}.pools.autoscaling.limits each"
        for name in ("cron", "timeZone", "minIdle")
    },
    **{
        f"autoscaling.predictive.{name}": f"{OPERATOR}.pools.autoscaling.predictive predictive"
        for name in ("serviceLevelPercent", "maxHorizonSeconds", "planStaleSeconds")
    },
    "autoscaling.predictive.costs.gpuSecond": f"{OPERATOR}.pools.autoscaling.predictive costs",
    "autoscaling.predictive.costs.sandboxSecond": f"{OPERATOR}.pools.autoscaling.predictive costs",
    "autoscaling.refill.maxPerSecond": f"{OPERATOR}.pools.autoscaling.limits refill",
    "autoscaling.refill.maxInFlight": f"{OPERATOR}.pools.autoscaling.limits refill",
    "backend": f"{OPERATOR}.builders.pool spec",
    "sandboxTemplateRef.name": f"{OPERATOR}.pools.observe named",
    "slotsPerReplica": f"{NODE}.server spec",
    "brokers": f"{OPERATOR}.builders.pool spec",
    "placement.nodeSelector": f"{OPERATOR}.builders.pool",
    **{
        f"placement.tolerations[].{name}": f"{OPERATOR}.builders.pod toleration"
        for name in ("key", "operator", "value", "effect")
    },
    "placement.onePerMachine": f"{OPERATOR}.builders.pool",
    "edge.keysRef.name": f"{OPERATOR}.builders.pool keys_ref",
    "edge.tlsRef.name": f"{OPERATOR}.builders.certificates secret",
    "edge.workspace": f"{OPERATOR}.builders.pool",
    "edge.maxSandboxes": f"{OPERATOR}.builders.pool",
    "network.egress": "etude.envserver.drivers.selection network",
    "network.policy": f"{OPERATOR}.builders.pool",
    "network.maxMib": f"{EGRESS} network",
    **{f"network.rules[].{name}": reader for name, reader in EGRESS_RULE.items()},
    "lease.ttlSeconds": f"{BROKER}.broker",
    "lease.maxQueue": f"{BROKER}.launch_admission policy",
    "lease.maxPerRun": f"{BROKER}.launch_admission policy",
    "lease.queueTimeoutSeconds": f"{BROKER}.broker",
    **{
        f"lease.classes[].{name}": f"{BROKER}.classes.queues each"
        for name in ("name", "weight", "floorSlots", "headroomSeconds")
    },
    "store.endpoint": "etude.common.stores storage",
    "store.region": "etude.common.stores storage",
    "store.secretRef.name": f"{OPERATOR}.builders.pool secret",
    "observability.otlpEndpoint": f"{OPERATOR}.builders.pool observability",
}
