"""A run and a pool to decide about."""

from collections.abc import Callable
from typing import Any

import pytest

from etude.common.api.kinds import EnvPool, RLRun
from etude.operator.desired import Platform

Build = Callable[..., dict[str, Any]]


def run_manifest(**spec: Any) -> dict[str, Any]:
    pool = {"templates": [{"name": "python", "trust": "Trusted"}], "replicas": 2}
    body = {
        "model": {"uri": "s3://inputs/model"},
        "storage": {"uri": "s3://runs/demo", "secretRef": {"name": "s3"}},
        "phases": [
            {
                "name": "sft",
                "type": "SupervisedFineTuning",
                "maxSteps": 10,
                "optimizer": {"learningRate": "3e-3"},
                "data": [{"name": "traces", "uri": "s3://inputs/traces.jsonl"}],
            },
            {
                "name": "rl",
                "type": "ReinforcementLearning",
                "maxSteps": 40,
                "optimizer": {"learningRate": "4.5e-4"},
                "tasks": [{"name": "train", "uri": "s3://inputs/tasks", "environment": "repos"}],
                "algorithm": {"name": "DrGRPO"},
            },
        ],
        "roles": {
            "trainer": {"cpu": "1", "memory": "4Gi", "env": [{"name": "EMPTY"}]},
            "inference": {"replicas": 2, "gpusPerReplica": 1},
            "environments": [{"name": "repos", "template": "python", "poolTemplate": pool}],
            "rewards": {"functions": [{"name": "tests", "function": "Verifier"}]},
        },
    }
    metadata = {"name": "demo", "namespace": "lab", "uid": "uid-run", "generation": 1}
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "RLRun",
        "metadata": metadata,
        "spec": {**body, **spec},
    }


@pytest.fixture
def run_body() -> Build:
    """Makes the manifest of a run with the given parts of the spec replaced."""
    return run_manifest


@pytest.fixture
def run() -> RLRun:
    return RLRun.model_validate(run_manifest())


@pytest.fixture
def pool() -> EnvPool:
    return EnvPool.model_validate(
        {
            "metadata": {"name": "repos", "namespace": "lab", "uid": "uid-pool"},
            "spec": {"templates": [{"name": "python"}], "isolation": {"minimum": "Process"}},
        }
    )


@pytest.fixture
def platform() -> Platform:
    images = {role: f"etude/{role}:1" for role in ("trainer", "inference", "rewards", "envserver")}
    return Platform(images=images, allows_weak_isolation=True)
