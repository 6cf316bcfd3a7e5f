"""The CRDs of a later release are there and its operator is not: objects have new fields."""

import json
from typing import Any

import pytest
from tests.support.kube.later_release import STRANGER, with_strangers

from etude.common.api.kinds import Checkpoint, EnvPool, RLRun
from etude.common.api.lint.linter import lint_text
from etude.operator.manifests import Manifest, Ref
from etude.v1 import run_pb2

KINDS: dict[str, type[RLRun | EnvPool | Checkpoint]] = {
    "RLRun": RLRun,
    "EnvPool": EnvPool,
    "Checkpoint": Checkpoint,
}


def upgraded(manifest: Manifest) -> Manifest:
    """The object once the API server has filled in the defaults of fields that are new."""
    known = KINDS[manifest["kind"]].model_validate(manifest)
    parts = {"spec": with_strangers(known.spec), "status": with_strangers(known.status)}
    return {**manifest, **parts}


@pytest.fixture
async def upgrading(lab: Any, run_body: Any) -> Any:
    """A run with a checkpoint, all of whose objects have got fields of the future."""
    body = run_body(checkpointing={"keepLast": 2})
    template = {"spec": {"containers": [{"name": "trainer", "ofTheirs": 1}]}}
    body["spec"]["roles"]["trainer"]["podTemplate"] = template
    lab.cluster.upsert(body)
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)
    await lab.tell_checkpoint(10)
    for key, manifest in lab.cluster.objects().items():
        if key.kind in KINDS:
            now = upgraded(manifest)
            lab.cluster.upsert(now)
            lab.cluster.set_status(key, now["status"])
    await lab.settle()
    return lab


def accepted(lab: Any, key: Ref) -> bool:
    conditions = lab.cluster.objects()[key]["status"]["conditions"]
    return not any(each["reason"] == "InvalidSpec" for each in conditions)


async def test_every_kind_is_looked_after_as_before(upgrading: Any) -> None:
    ours = [key for key in upgrading.cluster.objects() if key.kind in KINDS]
    assert {key.kind for key in ours} == set(KINDS)
    assert all(accepted(upgrading, key) for key in ours)
    await upgrading.finish_jobs()
    await upgrading.advance(6)
    assert upgrading.run().status.last_checkpoint.step == 10
    pods = upgrading.names("Pod")
    gone = upgrading.pods("inference")[0]["metadata"]["name"]
    upgrading.cluster.remove(Ref("Pod", "lab", gone))
    await upgrading.settle()
    assert upgrading.names("Pod") == pods


async def test_a_run_is_still_scaled(upgrading: Any) -> None:
    key = Ref("RLRun", "lab", "demo")
    body = upgrading.cluster.objects()[key]
    roles = body["spec"]["roles"]
    roles = {**roles, "inference": {**roles["inference"], "replicas": 3}}
    body["metadata"]["generation"] += 1
    upgrading.cluster.upsert({**body, "spec": {**body["spec"], "roles": roles}})
    await upgrading.settle()
    assert len(upgrading.pods("inference")) == 3


async def test_what_is_the_users_own_stays_whole(upgrading: Any) -> None:
    found = upgrading.cluster.objects()[Ref("StatefulSet", "lab", "demo-trainer")]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["ofTheirs"] == 1


async def test_a_status_that_only_a_later_release_can_read_is_left_to_it(running: Any) -> None:
    """After `helm rollback`: nothing of the run is lost, and somebody says why nothing moves."""
    key = Ref("RLRun", "lab", "demo")
    body, pods = running.cluster.objects()[key], running.names("Pod")
    phases = [{"name": body["spec"]["phases"][0]["name"], "state": "Paused"}]
    running.cluster.set_status(key, {**body["status"], "phases": phases})
    written = running.cluster.objects()[key]
    await running.advance(400)
    assert running.cluster.objects()[key] == written
    assert running.names("Pod") == pods
    (said,) = [each for each in running.cluster.events if each["reason"] == "InvalidStatus"]
    assert "status.phases.0.state" in said["note"]
    running.cluster.set_status(key, body["status"])
    await running.say(state=run_pb2.RUN_STATE_RUNNING, step=3)
    assert running.run().status.step.current == 3


def test_what_people_write_is_read_strictly(run_body: Any) -> None:
    body = run_body()
    body["spec"]["phases"][0] |= STRANGER
    (found,) = lint_text(json.dumps(body), name="run")
    assert found.field == "spec.phases[0].ofTheFuture"
