"""A lab with a trained run, its verified checkpoint, a shared pool and an evaluation."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from etude.common.api.kinds import EvalRun
from etude.operator.manifests import Manifest, Ref, labels

CHECKPOINT = "demo-s00000010-000000"
RESULT = {
    "policy": "1.7",
    "manifestDigest": "ab" * 32,
    "suites": [
        {
            "name": "held-out",
            "tasks": 30,
            "samples": 118,
            "lost": 2,
            "mean": "0.6120",
            "bestOf": "0.7433",
            "bestOfSamples": 4,
            "reward": "0.5900",
        }
    ],
}

Build = Callable[..., dict[str, Any]]


def evaluation_manifest(name: str = "held-out", **spec: Any) -> dict[str, Any]:
    body = {
        "checkpointRef": {"name": CHECKPOINT},
        "samples": 4,
        "suites": [{"name": "held-out", "uri": "s3://inputs/held-out", "environment": "repos"}],
        "environments": [{"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}],
    }
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "EvalRun",
        "metadata": {"name": name, "namespace": "lab", "uid": f"uid-{name}", "generation": 1},
        "spec": {**body, **spec},
    }


POOL = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "shared", "namespace": "lab", "uid": "uid-shared", "generation": 1},
    "spec": {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "replicas": 1,
        "store": {"secretRef": {"name": "s3"}},
    },
}


class Evaluations:
    """Acts on the evaluations of a lab as their pods would."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab

    async def add(self, name: str = "held-out", **spec: Any) -> None:
        self.lab.cluster.upsert(evaluation_manifest(name, **spec))
        await self.lab.settle()

    def get(self, name: str = "held-out") -> EvalRun:
        found = self.lab.cluster.objects()[Ref("EvalRun", "lab", name)]
        return EvalRun.parse_known_fields(found)

    def reason(self, kind: str, name: str = "held-out") -> tuple[str, str, str]:
        found = next(c for c in self.get(name).status.conditions if c.type == kind)
        return found.status, found.reason, found.message

    def children(self, name: str = "held-out") -> dict[Ref, Manifest]:
        found = self.lab.cluster.objects()
        return {k: m for k, m in found.items() if labels(m).get("etude.dev/evaluation") == name}

    def job_pods(self, name: str = "held-out") -> list[Ref]:
        return [k for k in self.children(name) if k.kind == "Pod" and "-evaluator-" in k.name]

    async def end(
        self, message: str = json.dumps(RESULT), *, exit_code: int = 0, name: str = "held-out"
    ) -> None:
        """The newest pod of the Job ends."""
        ended = {"exitCode": exit_code, "message": message}
        status = {
            "phase": "Failed" if exit_code else "Succeeded",
            "containerStatuses": [{"name": "evaluator", "state": {"terminated": ended}}],
        }
        self.lab.cluster.set_status(max(self.job_pods(name)), status)
        await self.lab.settle()


async def _prepare(lab: Any, body: dict[str, Any]) -> Evaluations:
    lab.cluster.upsert(body)
    lab.cluster.upsert(POOL)
    await lab.settle()
    await lab.tell_checkpoint(10)
    await lab.finish_jobs()
    return Evaluations(lab)


@pytest.fixture
def prepare() -> Callable[[Any, dict[str, Any]], Any]:
    """Trains a run and verifies its checkpoint in a lab."""
    return _prepare


@pytest.fixture
async def evaluations(lab: Any, run_body: Build) -> Evaluations:
    return await _prepare(lab, run_body())
