"""Objects of a cluster as the API server shows them, for what looks at them."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from etude.cli.kubectl.diagnose.run_objects import RunObjects, sort_objects

Manifest = dict[str, Any]

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
FINE = {
    "Accepted": ("True", "Accepted"),
    "QuotaReserved": ("True", "NotNeeded"),
    "PodsScheduled": ("True", "Scheduled"),
    "RolesReady": ("True", "PodsReady"),
    "EnvironmentsReady": ("True", "PoolsAvailable"),
    "Ready": ("True", "ControllerConnected"),
    "Progressing": ("True", "StepsFinish"),
    "CheckpointHealthy": ("True", "CheckpointVerified"),
    "Suspended": ("False", "NotSuspended"),
    "Stalled": ("False", "Healthy"),
    "Degraded": ("False", "Healthy"),
    "Complete": ("False", "NotFinished"),
    "Failed": ("False", "NotFinished"),
}
"""What the operator says of a run that progresses."""


def before(seconds: float) -> str:
    """A time so many seconds ago."""
    return (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def condition(kind: str, status: str, reason: str, message: str = "") -> Manifest:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": before(60),
    }


def run(*changed: Manifest, name: str = "demo", **status: Any) -> Manifest:
    """A run in reinforcement learning whose last step finished 10 s ago, but for what changed."""
    known = {kind: condition(kind, *what) for kind, what in FINE.items()}
    known |= {each["type"]: each for each in changed}
    environment = {"name": "repos", "poolRef": {"name": "swe"}, "template": "python"}
    return {
        "kind": "RLRun",
        "metadata": {"name": name, "namespace": "lab", "uid": f"uid-{name}", "generation": 1},
        "spec": {
            "phases": [{"name": "rl", "type": "ReinforcementLearning"}],
            "roles": {"environments": [environment]},
            "failurePolicy": {"maxRestarts": 3},
        },
        "status": {
            "observedGeneration": 1,
            "phase": "Running",
            "activePhase": "rl",
            "step": {"current": 12, "target": 60, "text": "12/60"},
            "lastStepTime": before(10),
            "conditions": list(known.values()),
            **status,
        },
    }


def pod(
    role: str = "trainer",
    *,
    ready: bool = True,
    pool: str = "",
    container: Mapping[str, Any] | None = None,
    conditions: Iterable[Manifest] = (),
    **spec: Any,
) -> Manifest:
    """A pod of the run, or of a pool."""
    owner = pool or "demo"
    label = "etude.dev/pool" if pool else "etude.dev/run"
    state = {"name": role, "image": "registry/etude:1", "restartCount": 0, **(container or {})}
    found = [condition("Ready", str(ready), "", ""), *conditions]
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"{owner}-{role}-0",
            "namespace": "lab",
            "uid": f"uid-{owner}-{role}-0",
            "labels": {label: owner, "etude.dev/role": role, "etude.dev/attempt": "0"},
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": role}], **spec},
        "status": {"phase": "Running", "conditions": found, "containerStatuses": [state]},
    }


def waiting(reason: str, message: str = "", **container: Any) -> Manifest:
    """A container that waits for something."""
    return {"state": {"waiting": {"reason": reason, "message": message}}, **container}


def ended(code: int, message: str = "", reason: str = "Error") -> Manifest:
    """How a container ended."""
    return {"terminated": {"exitCode": code, "message": message, "reason": reason}}


def pool(*conditions: Manifest, name: str = "swe", **status: Any) -> Manifest:
    """A pool that hands out environments, but for its conditions."""
    known = {
        "Accepted": condition("Accepted", "True", "Accepted"),
        "Available": condition("Available", "True", "NodesReady"),
        "Degraded": condition("Degraded", "False", "Healthy"),
    }
    known |= {each["type"]: each for each in conditions}
    return {
        "kind": "EnvPool",
        "metadata": {"name": name, "namespace": "lab", "uid": f"uid-{name}"},
        "spec": {"replicas": 1},
        "status": {"conditions": list(known.values()), "replicas": 2, "readyReplicas": 2, **status},
    }


def checkpoint(step: int, seconds_ago: float = 0, **metadata: Any) -> Manifest:
    """A checkpoint of the run."""
    return {
        "kind": "Checkpoint",
        "metadata": {
            "name": f"demo-s{step:08d}",
            "namespace": "lab",
            "uid": f"uid-{step}",
            "creationTimestamp": before(seconds_ago),
            **metadata,
        },
        "spec": {
            "runRef": {"name": "demo"},
            "step": step,
            "reason": "Scheduled",
            "sizeBytes": 2**20,
        },
        "status": {"phase": "Ready"},
    }


def event(about: Manifest, reason: str, message: str, seconds_ago: float = 0) -> Manifest:
    return {
        "involvedObject": {"uid": about["metadata"]["uid"]},
        "reason": reason,
        "message": message,
        "lastTimestamp": before(seconds_ago),
    }


def seen(what: Manifest, *around: Manifest, events: Iterable[Manifest] = ()) -> RunObjects:
    """The run in a namespace with these objects; its pool is there and well unless another is."""
    pools = [each for each in around if each["kind"] == "EnvPool"] or [pool()]
    others = [each for each in around if each["kind"] != "EnvPool"]
    return sort_objects(what, [*pools, *others], list(events))
