"""Checkpoints that users name, pin and keep."""

import re
from typing import Any

import pytest

from etude.common.api.kinds import Checkpoint
from etude.operator.actions import ClockReading
from etude.operator.builders.platform import Platform
from etude.operator.checkpoints.decide import ObservedCheckpoint, decide
from etude.operator.conditions import false_condition
from etude.operator.manifests import Ref

LABEL = re.compile(r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")
SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")


def imported(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "etude.dev/v1alpha1",
        "kind": "Checkpoint",
        "metadata": {"name": name, "namespace": "lab"},
        "spec": {
            "reason": "Imported",
            "deletionPolicy": "Retain",
            "source": {"uri": "s3://b/old", "manifestDigest": "0" * 64},
            "storage": {"uri": "s3://b"},
        },
    }


async def test_a_change_of_a_verified_checkpoint_is_observed(lab: Any) -> None:
    lab.cluster.upsert(imported("old"))
    await lab.settle()
    await lab.finish_jobs()
    body = imported("old")
    body["spec"]["pinned"] = True
    lab.cluster.upsert(body)
    await lab.settle()
    live = lab.cluster.objects()[Ref("Checkpoint", "lab", "old")]
    assert live["status"]["phase"] == "Ready"
    assert live["metadata"]["generation"] > 1
    assert live["status"]["observedGeneration"] == live["metadata"]["generation"]
    observed = {each["observedGeneration"] for each in live["status"]["conditions"]}
    assert observed == {live["metadata"]["generation"]}


@pytest.mark.parametrize(
    "name",
    ["a" * 253, "a" * 62 + ".b", "a" * 49 + ".b", "a" * 49 + "-b", "a.b", "a" * 62 + "-" + "b" * 9],
)
async def test_a_checkpoint_of_any_name_is_verified_at_once(lab: Any, name: str) -> None:
    lab.cluster.upsert(imported(name))
    await lab.settle()
    (job,) = [each for key, each in lab.cluster.objects().items() if key.kind == "Job"]
    assert SUBDOMAIN.match(job["metadata"]["name"])
    assert len(job["metadata"]["name"]) <= 63
    template = job["spec"]["template"]["metadata"]
    for labels in (job["metadata"]["labels"], template["labels"]):
        for value in labels.values():
            assert LABEL.match(value), value
    await lab.finish_jobs()
    live = lab.cluster.objects()[Ref("Checkpoint", "lab", name)]
    assert live["status"]["phase"] == "Ready"


@pytest.mark.parametrize("is_going", [False, True])
def test_a_job_that_the_api_server_refuses_is_named_in_the_status(
    platform: Platform, *, is_going: bool
) -> None:
    body = imported("old")
    body["metadata"] |= {"uid": "u", "finalizers": ["etude.dev/checkpoint-data"]}
    body["spec"] |= {"deletionPolicy": "Delete", "runRef": {"name": "demo", "uid": "r"}}
    if is_going:
        body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    words = "Job lab/old is invalid: spec.template.spec.containers[0].envFrom[0].secretRef.name"
    seen = ObservedCheckpoint(manifest=body, problem=false_condition("Accepted", "Refused", words))
    now = ClockReading(wall_s=1_700_000_000.0, monotonic_s=1.0)
    found = decide(Checkpoint.model_validate(body), seen, now, platform)
    (ready,) = found.status.conditions
    assert (ready.type, ready.status, ready.reason) == ("Ready", "False", "Refused")
    assert ready.message == words
    assert found.status.phase == ("Deleting" if is_going else "Verifying")
    assert len(found.actions) == 1, "it is tried again"
