"""The objects of the bench: runs, pools, nodes."""

from typing import Any

from etude.common.api.meta import API_VERSION

NAMESPACE = "bench"
PODS_PER_NODE = 200
STEPS = 20
"""Of a complete life, with a checkpoint half way and one at the end."""
LIFE = "life"
"""Names of runs that live through all of it begin so; the others rest in their first step."""
REST = "rest"
THEIRS = "theirs"
"""Made by the operator that ours is compared with."""


def sft_run(name: str) -> dict[str, Any]:
    """A supervised run: a trainer, and nothing else."""
    return _run(
        name,
        {
            "phases": [
                {
                    "name": "sft",
                    "type": "SupervisedFineTuning",
                    "maxSteps": STEPS,
                    "optimizer": {"learningRate": "3e-3"},
                    "data": [{"name": "traces", "uri": "s3://bench/traces.jsonl"}],
                }
            ],
            "roles": {"trainer": {"cpu": "1"}},
        },
    )


def rl_run(name: str) -> dict[str, Any]:
    """A run of every role, with a pool of its own."""
    template = {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process"},
        "replicas": 1,
    }
    return _run(
        name,
        {
            "phases": [
                {
                    "name": "rl",
                    "type": "ReinforcementLearning",
                    "maxSteps": STEPS,
                    "optimizer": {"learningRate": "1e-4"},
                    "tasks": [{"name": "train", "uri": "s3://bench/tasks", "environment": "repos"}],
                    "algorithm": {"name": "DrGRPO", "promptsPerStep": 4},
                }
            ],
            "roles": {
                "trainer": {"cpu": "1"},
                "inference": {"replicas": 1},
                "rewards": {"functions": [{"name": "success", "function": "Verifier"}]},
                "environments": [{"name": "repos", "template": "python", "poolTemplate": template}],
            },
        },
    )


def _run(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    common = {
        "model": {"uri": "s3://bench/model"},
        "storage": {"uri": f"s3://bench/{name}"},
        "checkpointing": {"everySteps": STEPS // 2},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "RLRun",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": common | spec,
    }


def pool(name: str, replicas: int) -> dict[str, Any]:
    """A pool of many nodes."""
    return {
        "apiVersion": API_VERSION,
        "kind": "EnvPool",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "templates": [{"name": "python", "trust": "Trusted"}],
            "isolation": {"minimum": "Process"},
            "replicas": replicas,
        },
    }


def node(name: str) -> dict[str, Any]:
    """A machine that KWOK plays, with room for many pods."""
    room = {"cpu": "4000", "memory": "16Ti", "pods": str(PODS_PER_NODE), "ephemeral-storage": "9Ti"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {"kubernetes.io/hostname": name, "type": "kwok"},
        },
        "status": {"capacity": room, "allocatable": room},
    }
