"""Where each field of PolicyRoute and EvalRun must show, in the form of `knobs.py`."""

import runpy
from pathlib import Path
from typing import Any

RUNS: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("knobs.py")))
OPERATOR = RUNS["OPERATOR"]
TRAINER = RUNS["TRAINER"]
RELEASE = RUNS["RELEASE"]
RLRUN = RUNS["RLRUN"]
CHANNEL = RUNS["CHANNEL"]
ENGINES = RUNS["ENGINES"]
TOLERATIONS = RUNS["TOLERATIONS"]
ROUTE_PARTS = RUNS["ROUTE_PARTS"]
under = RUNS["under"]

SERVICE = {
    **dict.fromkeys(
        ("image", "cpu", "memory", "nodeSelector", "priorityClassName"), f"{ROUTE_PARTS} spec"
    ),
    **TOLERATIONS,
    "tlsRef.name": f"{OPERATOR}.builders.certificates secret",
}
ROUTE = {
    "runRef.name": f"{OPERATOR}.routes.decide",
    "model": ROUTE_PARTS,
    **dict(under("channels.stable", CHANNEL | ENGINES)),
    "channels.stable.replicas": f"{ROUTE_PARTS} engines",
    **dict(under("channels.canary", CHANNEL | ENGINES)),
    "channels.canary.replicas": f"{ROUTE_PARTS} engines",
    "channels.lending.minReplicas": "etude.gateway.lending rules",
    "channels.lending.turnsPerEngine": "etude.gateway.lending rules",
    "channels.lending.windowSeconds": "etude.gateway.lending rules",
    **dict(under("gateway", SERVICE)),
    "gateway.keysRef.name": f"{ROUTE_PARTS} keys_ref",
    "gateway.replicas": ROUTE_PARTS,
    "gateway.recordTurns": ROUTE_PARTS,
    **{
        f"gateway.limits.{name}": ROUTE_PARTS
        for name in ("bodyMib", "sessionTokens", "waitingMib", "outageSeconds", "turnSeconds")
    },
    **dict(under("feedback", SERVICE)),
    "feedback.keysRef.name": f"{ROUTE_PARTS} keys_ref",
    "feedback.secretRef.name": f"{ROUTE_PARTS} secret_ref",
    "feedback.keyStoreUri": ROUTE_PARTS,
    "policy": ROUTE_PARTS,
    "gate.minTasks": f"{RELEASE}.decide rules.gate",
    "gate.attackLevel": f"{RELEASE}.rules self",
    "gate.gainSuites": f"{RELEASE}.rules self",
    **{
        f"gate.margins[].{name}": "etude.common.evaluation.gate rule"
        for name in ("metric", "margin", "isShare", "lessIsBetter")
    },
    "canary.steps": f"{RELEASE}.looks canary.rules",
    "canary.stepSeconds": f"{RELEASE}.looks canary.rules",
    "canary.maxSeconds": f"{RELEASE}.looks canary.rules",
    "canary.usersPerArm": f"{RELEASE}.rules self",
    "canary.minUsers": f"{RELEASE}.rules self",
    **{
        f"canary.{metric}.{name}": f"{RELEASE}.rules self"
        for metric in ("primary", "guardrails[]", "signals[]")
        for name in ("name", "relevant", "isHigherBetter", "unit")
    },
    **{
        f"canary.{metric}.signal": f"{RELEASE}.figures metric"
        for metric in ("primary", "guardrails[]", "signals[]")
    },
    "feedback.turnRetentionSeconds": f"{ROUTE_PARTS} feedback",
    **{
        f"feedback.windows.{name}": f"{ROUTE_PARTS} windows"
        for name in (
            "rollouts",
            "minRollouts",
            "maxAgeSeconds",
            "horizonSeconds",
            "outcomeSeconds",
            "tenant",
        )
    },
}
DRIVER = f"{TRAINER}.commands.evaluate_checkpoint"
EVAL_RUN = {
    "checkpointRef.name": f"{OPERATOR}.evaluations.observe named",
    "runRef.name": f"{OPERATOR}.evaluations.observe",
    **{
        f"endpoint.{name}": f"{TRAINER}.commands.evaluate endpoint"
        for name in ("url", "model", "requestSeconds")
    },
    "endpoint.secretRef.name": f"{OPERATOR}.evaluations.children secret",
    **{f"suites[].{name}": DRIVER for name in ("name", "uri", "environment", "limit")},
    "suites[].attacks": f"{TRAINER}.commands.evaluation_result",
    "environments[].name": DRIVER + " each",
    "environments[].poolRef.name": f"{OPERATOR}.evaluations.observe",
    "environments[].template": DRIVER + " each",
    **dict.fromkeys(("samples", "greedy", "seed"), DRIVER),
    **{
        path.removeprefix("phases[]."): reader
        for path, reader in RLRUN.items()
        if path.startswith("phases[].rollout.") and ".concurrency." not in path
    },
    "rollout.maxConcurrent": f"{TRAINER}.rollouts.worker order.limits",
    "rollout.maxInfraFailurePercent": DRIVER,
    "engines": f"{OPERATOR}.evaluations.children",
    "comparison.baselineRef.name": f"{OPERATOR}.evaluations.observe",
    "comparison.margins[].metric": f"{TRAINER}.commands.evaluation_result each",
    "comparison.margins[].largestLoss": f"{TRAINER}.commands.evaluation_result each",
    "comparison.minTasks": f"{TRAINER}.commands.evaluation_result",
    "timeoutSeconds": f"{OPERATOR}.evaluations.children",
}

OWN = ("checkpointRef.", "comparison.", "endpoint.", "runRef.")
"""Fields that a route does not have: it chooses checkpoint and baseline."""
ROUTE |= {
    f"gate.evaluation.{path}": reader if "." in path else f"{reader} spec"
    for path, reader in EVAL_RUN.items()
    if not path.startswith(OWN)
}
"""A route copies them into its EvalRuns."""

KNOBS = {"PolicyRoute": ROUTE, "EvalRun": EVAL_RUN}
