"""The chart's role against what an operator does in a life of every kind of object."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from etude.operator.kube.watches import CHILDREN
from etude.operator.manifests import IMMUTABLE, OWN_KINDS, RESOURCES, Ref
from etude.v1 import release_pb2, run_pb2

TEMPLATE = Path(__file__).parents[4] / "helm" / "etude" / "templates" / "rbac.yaml"
VERBS = {
    "apply": ("create", "get", "patch"),  # it looks whose a name is that is taken
    "delete": ("delete",),
    "status": ("patch",),
    "finalizers": ("patch",),
}
Right = tuple[str, str, str]
"""API group, resource, verb."""


def granted() -> set[Right]:
    text = TEMPLATE.read_text(encoding="utf-8")
    rules = text.split('{{- define "etude.rules" -}}')[1].split("{{- end -}}")[0]
    return {
        (group, resource, verb)
        for rule in yaml.safe_load(rules)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def right(kind: str, verb: str, part: str = "") -> Right:
    api_version, plural = RESOURCES[kind]
    group = api_version.rpartition("/")[0]
    return group, f"{plural}/{part}" if part else plural, verb


def used(lab: Any, owners: set[str]) -> Iterator[Right]:
    for kind in (*OWN_KINDS, *CHILDREN):
        yield from (right(kind, "list"), right(kind, "watch"))
    for write in lab.writes:
        did, _, kind = write.partition("/")[0].partition(" ")
        for verb in VERBS[did] if kind not in IMMUTABLE else set(VERBS[did]) - {"patch"}:
            yield right(kind, verb, "status" if did == "status" else "")
    if lab.cluster.events:
        yield right("Event", "create")
    for kind in owners:
        yield right(kind, "update", "finalizers")


POOL = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EnvPool",
    "metadata": {"name": "shared", "namespace": "lab"},
    "spec": {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "replicas": 1,
        "store": {"secretRef": {"name": "s3"}},
    },
}
PLAN = {
    "suites": [{"name": "held-out", "uri": "s3://inputs/tasks", "environment": "repos"}],
    "environments": [{"name": "repos", "poolRef": {"name": "shared"}, "template": "python"}],
}
EVALUATION = {
    "apiVersion": "etude.dev/v1alpha1",
    "kind": "EvalRun",
    "metadata": {"name": "held-out", "namespace": "lab"},
    "spec": {"checkpointRef": {"name": "demo-s00000020-000000"}, **PLAN},
}


async def evaluate_candidates(lab: Any) -> None:
    """The route evaluates a checkpoint, and leaves it for a newer one."""
    stable = release_pb2.ServedPolicyVersion(checkpoint="demo-s00000020-000000")
    stable.version.epoch = 1
    report = release_pb2.GetReleaseStatusResponse(stable=stable)
    lab.peers.releases["coder-feedback-0.coder-feedback:7091"].append(report)
    for version in (1, 2):
        record = run_pb2.CheckpointRecord(
            step=30 + version,
            reason="Window",
            uri=f"s3://runs/demo/checkpoints/{version}",
            manifest_digest=f"{version:064x}",
            policy_version=version,
        )
        await lab.tell(record)
        await lab.finish_jobs()
        await lab.advance(40)


async def test_the_operator_has_every_right_that_it_uses_and_no_other(
    lab: Any, run_body: Any, route_body: Any
) -> None:
    owners = set()

    def look() -> None:
        for manifest in lab.cluster.objects().values():
            for owner in manifest["metadata"].get("ownerReferences", ()):
                if owner.get("blockOwnerDeletion"):
                    owners.add(owner["kind"])

    keep = {"keepLast": 1}
    lab.cluster.upsert(run_body(checkpointing=keep))
    lab.cluster.upsert(route_body(gate={"evaluation": PLAN}))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    for step in (10, 20):
        await lab.tell_checkpoint(step)
        look()
        await lab.finish_jobs()
    await evaluate_candidates(lab)
    lab.cluster.upsert(POOL)
    lab.cluster.upsert(EVALUATION)
    await lab.settle()
    look()
    pod = Ref("Pod", "lab", "demo-repos-node-0")
    assert pod in lab.cluster.objects()
    lab.cluster.set_status(pod, {"phase": "Failed"})
    await lab.settle()
    body = run_body(checkpointing=keep)
    del body["spec"]["phases"][1:]
    body["spec"]["roles"] = {"trainer": {}}
    body["spec"]["ttlSecondsAfterFinished"] = 0
    lab.cluster.upsert(body)
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await lab.advance(1)
    assert granted() == set(used(lab, owners))
