"""What the operator leaves alone: a steady cluster, pods of an older operator, secrets."""

import asyncio
import json

import pytest
from tests.operator_faults.lab import Lab
from tests.operator_faults.workloads import (
    POOL,
    RUN,
    ours,
    phase,
    pool,
    reinforced,
    saved,
    store,
    supervised,
)

from etude.operator.manifests import Manifest

STEADY_S = 60.0
"""The promise is about a minute."""
CANARIES = [f"canary-{number:02d}-c0ffee" for number in range(20)]


async def _reinforced_and_running(scene) -> None:
    await scene.create(reinforced())
    await scene.until(lambda: phase(scene) == "Running")
    await saved(scene, 1)
    await scene.until(lambda: not scene.scenery.every("Job"))


@pytest.mark.long
async def test_p02_a_steady_cluster_costs_no_write_for_a_minute(lab: Lab) -> None:
    async with lab.scene() as scene, lab.acting(scene) as operator:
        await _reinforced_and_running(scene)
        await scene.scenery.quiet(5.0)
        before = len(operator.proxy.writes)
        await asyncio.sleep(STEADY_S)
        assert operator.proxy.writes[before:] == []


async def test_p20_an_operator_of_another_version_restarts_no_pod(lab: Lab) -> None:
    async with lab.scene() as scene, lab.acting(scene) as operator:
        await _reinforced_and_running(scene)
        await scene.scenery.quiet(2.0)
        before = _uids(scene)
        templates = _templates(scene)
        await operator.kill()
        scene.environment |= {f"ETUDE_IMAGE_{part}": "etude/next:2" for part in _PARTS}
        writes = len(operator.proxy.writes)
        await operator.start()
        await scene.merge("RLRun", RUN, {"spec": {"checkpointing": {"keepLast": 5}}})
        await scene.until(lambda: "configure" in store(scene).orders)
        await scene.scenery.quiet(3.0)
        assert _uids(scene) == before
        assert _templates(scene) == templates, operator.proxy.writes[writes:]
        assert scene.problems() == []


_PARTS = ("TRAINER", "INFERENCE", "REWARDS", "ENVSERVER", "OPERATOR", "GATEWAY", "FEEDBACK")


def _uids(scene) -> dict[str, str]:
    return {
        each["metadata"]["name"]: each["metadata"]["uid"] for each in scene.scenery.every("Pod")
    }


def _templates(scene) -> list[Manifest]:
    return [each["spec"]["template"] for each in scene.scenery.every("StatefulSet")]


async def test_p04_a_namespace_that_goes_while_the_operator_is_down_is_gone_after_its_return(
    lab: Lab,
) -> None:
    async with lab.scene() as scene, lab.acting(scene) as operator:
        await scene.create(pool(1))
        await scene.create(supervised())
        await saved(scene, 1)
        await operator.kill()
        await scene.api.call("DELETE", f"/api/v1/namespaces/{scene.namespace}")
        await scene.until(lambda: not scene.scenery.every("Pod"))
        assert ours(scene), "a checkpoint's data waits for the operator"
        await operator.start()
        await scene.until(lambda: not ours(scene))
        assert scene.problems() == []
    assert POOL


async def test_p14_no_secret_value_is_in_a_status_an_event_or_a_log(lab: Lab) -> None:
    async with lab.scene() as scene, lab.acting(scene) as operator:
        half = len(CANARIES) // 2
        data = {f"KEY_{number}": value for number, value in enumerate(CANARIES[:half])}
        body = {"metadata": {"name": "s3"}, "stringData": data}
        await scene.api.call("POST", f"/api/v1/namespaces/{scene.namespace}/secrets", body)
        env = [
            {"name": f"TOKEN_{number}", "value": value}
            for number, value in enumerate(CANARIES[half:])
        ]
        storage = {"uri": "s3://runs/demo", "secretRef": {"name": "s3"}}
        await scene.create(supervised(storage=storage, roles={"trainer": {"env": env}}))
        await scene.until(lambda: phase(scene) == "Running")
        await saved(scene, 1)
        await _fails_and_restarts(scene)
        events = await scene.api.call(
            "GET", f"/apis/events.k8s.io/v1/namespaces/{scene.namespace}/events"
        )
        told = json.dumps([e for e in events["items"] if "etude" in json.dumps(e)])
        assert told.count("etude.dev") > 5
        said = [each.get("status", {}) for each in scene.scenery.objects.values()]
        everything = told + json.dumps(said) + scene.log() + _metrics(operator)
        assert [canary for canary in CANARIES if canary in everything] == []
        assert scene.problems() == []


def _metrics(operator) -> str:
    return "\n".join(str(call.query) for call in operator.proxy.writes)


async def _fails_and_restarts(scene) -> None:
    """The trainer ends with an exit code, so that a failure is told too."""
    pod = scene.get("Pod", f"{RUN}-trainer-0")
    ended = {"exitCode": 1, "reason": "Error", "message": "boom"}
    container = {
        "name": pod["spec"]["containers"][0]["name"],
        "ready": False,
        "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": ended},
    }
    status = {
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [container],
    }
    await scene.merge("Pod", pod["metadata"]["name"], {"status": status}, "status")
    await scene.until(lambda: scene.get("RLRun", RUN)["status"].get("attempt") == 1)
    await scene.until(lambda: phase(scene) == "Running")
