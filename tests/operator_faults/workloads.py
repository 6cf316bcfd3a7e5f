"""What users do to a run and a pool: create and finish, scale and update, delete."""

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from tests.operator_faults.controllers import Kept
from tests.operator_faults.lab import Scene

from etude.common.api.meta import API_VERSION
from etude.operator import names
from etude.operator.manifests import Manifest, is_deleting, labels, uid

RUN, POOL = "demo", "swe"


class Workload(NamedTuple):
    """A story with a beginning that has no faults."""

    name: str
    prepare: Callable[[Scene], Coroutine[None, None, None]]
    act: Callable[[Scene], Coroutine[None, None, None]]


def pool(replicas: int) -> Manifest:
    """A pool whose nodes nobody leases from."""
    templates = [{"name": "python", "trust": "Trusted"}]
    spec = {"templates": templates, "replicas": replicas, "isolation": {"minimum": "Process"}}
    return {
        "apiVersion": API_VERSION,
        "kind": "EnvPool",
        "metadata": {"name": POOL},
        "spec": spec,
    }


def supervised(**spec: Any) -> Manifest:
    """A run with one role."""
    body = {
        "model": {"uri": "s3://inputs/model"},
        "storage": {"uri": "s3://runs/demo"},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 20,
                "optimizer": {"learningRate": "3e-3"},
                "data": [{"name": "traces", "uri": "s3://inputs/traces.jsonl"}],
            }
        ],
        "roles": {"trainer": {}},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "RLRun",
        "metadata": {"name": RUN},
        "spec": body | spec,
    }


def reinforced() -> Manifest:
    """A run with every role and a pool of its own."""
    template = {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "replicas": 2,
        "isolation": {"minimum": "Process"},
    }
    phase = {
        "name": "rl",
        "type": "ReinforcementLearning",
        "maxSteps": 20,
        "optimizer": {"learningRate": "4.5e-4"},
        "tasks": [{"name": "train", "uri": "s3://inputs/tasks", "environment": "repos"}],
        "algorithm": {"name": "DrGRPO"},
    }
    roles = {
        "trainer": {},
        "inference": {"replicas": 2},
        "environments": [{"name": "repos", "template": "python", "poolTemplate": template}],
        "rewards": {"functions": [{"name": "tests", "function": "Verifier"}]},
    }
    return supervised(phases=[phase], roles=roles)


def store(scene: Scene) -> Kept:
    """What the run has saved, and been told."""
    return scene.kubelet.stores[uid(scene.get("RLRun", RUN))]


def phase(scene: Scene) -> str:
    return str(scene.get("RLRun", RUN).get("status", {}).get("phase", ""))


async def finished(scene: Scene) -> None:
    """Wait for the end of the run."""
    await scene.until(lambda: uid(scene.get("RLRun", RUN) or {"metadata": {}}))
    store(scene).may_finish.set()
    await scene.until(lambda: scene.holds("RLRun", RUN, "Complete"))
    await scene.until(lambda: not _pods(scene))


def _pods(scene: Scene) -> list[str]:
    """Those of the run's roles."""
    found = scene.scenery.every("Pod")
    return [each["metadata"]["name"] for each in found if labels(each).get(names.RUN) == RUN]


async def saved(scene: Scene, count: int) -> None:
    """Wait until so many checkpoints are verified."""

    def ready() -> bool:
        found = scene.scenery.every("Checkpoint")
        return (
            len([each for each in found if each.get("status", {}).get("phase") == "Ready"]) >= count
        )

    await scene.until(ready)


async def _nothing(scene: Scene) -> None:
    assert scene.namespace


async def _create(scene: Scene) -> None:
    await scene.create(reinforced())
    await finished(scene)


async def _running(scene: Scene) -> None:
    await scene.create(pool(1))
    await scene.create(supervised())
    await saved(scene, 1)
    await scene.until(lambda: phase(scene) == "Running")
    await _has_nodes(scene, 1)
    await scene.until(lambda: not scene.scenery.every("Job"))


async def _has_nodes(scene: Scene, count: int) -> None:
    def settled() -> bool:
        status = scene.get("EnvPool", POOL).get("status", {})
        nodes = [n for n in scene.scenery.every("Pod") if "-node-" in n["metadata"]["name"]]
        return bool(status.get("readyReplicas") == count == len(nodes))

    await scene.until(settled)


async def _update(scene: Scene) -> None:
    await scene.merge("EnvPool", POOL, {"spec": {"replicas": 3}}, "scale")
    await _has_nodes(scene, 3)
    await scene.merge("RLRun", RUN, {"spec": {"checkpointing": {"keepLast": 7}}})
    await scene.until(lambda: "configure" in store(scene).orders and _is_observed(scene))
    await scene.merge("EnvPool", POOL, {"spec": {"replicas": 1}}, "scale")
    await _has_nodes(scene, 1)
    await scene.merge("RLRun", RUN, {"spec": {"suspend": True}})
    await scene.until(lambda: scene.holds("RLRun", RUN, "Suspended"))
    await scene.merge("RLRun", RUN, {"spec": {"suspend": False}})
    await scene.until(lambda: phase(scene) == "Running" and _is_observed(scene))


def _is_observed(scene: Scene) -> bool:
    run = scene.get("RLRun", RUN)
    return bool(run["status"].get("observedGeneration") == run["metadata"]["generation"])


async def _over(scene: Scene) -> None:
    await scene.create(pool(2))
    await scene.create(supervised())
    await _has_nodes(scene, 2)
    await finished(scene)
    await saved(scene, 2)
    await scene.until(lambda: not scene.scenery.every("Job"))


async def _delete(scene: Scene) -> None:
    await scene.api.delete(scene.ref("RLRun", RUN), propagationPolicy="Background")
    await scene.api.delete(scene.ref("EnvPool", POOL), propagationPolicy="Background")
    await scene.until(lambda: not ours(scene))


def ours(scene: Scene) -> list[str]:
    """Everything in the namespace that a run or a pool led to."""
    found = scene.scenery.objects.items()
    return [
        f"{key.kind}/{key.name}{' (going)' if is_deleting(manifest) else ''}"
        for key, manifest in found
        if key.name != "kube-root-ca.crt"
    ]


CREATE = Workload("create-finish", _nothing, _create)
UPDATE = Workload("scale-update", _running, _update)
DELETE = Workload("delete", _over, _delete)
WORKLOADS = (CREATE, UPDATE, DELETE)
