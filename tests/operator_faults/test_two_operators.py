"""Two operators: one acts, the other takes over, and one that was stopped is fenced."""

import asyncio
import signal
import time

from tests.operator_faults.lab import Lab, Scene
from tests.operator_faults.workloads import POOL, pool
from tests.support import figures

from etude.operator.kube.rest import path_of


async def _holder(scene: Scene) -> str:
    path = path_of("Lease", scene.namespace)
    found = await scene.api.call("GET", path)
    return "".join(each["spec"].get("holderIdentity") or "" for each in found["items"])


async def _led_by(scene: Scene, name: str) -> None:
    async with asyncio.timeout(120):
        while await _holder(scene) != name:  # noqa: ASYNC110 - a lease is read as kubectl does
            await asyncio.sleep(0.1)


async def _has_nodes(scene: Scene, count: int) -> None:
    await scene.until(
        lambda: scene.get("EnvPool", POOL).get("status", {}).get("readyReplicas") == count
    )


async def test_p10_of_two_operators_one_acts_and_one_that_was_stopped_is_fenced(lab: Lab) -> None:
    async with lab.scene() as scene, lab.acting(scene, "first") as first:
        await _led_by(scene, "first")
        async with lab.acting(scene, "second") as second:
            await scene.create(pool(1))
            await _has_nodes(scene, 1)
            assert not second.proxy.writes, "only the leader writes"
            first.signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            await scene.merge("EnvPool", POOL, {"spec": {"replicas": 3}}, "scale")
            await _led_by(scene, "second")
            figures.record("faults", takeover_s=round(time.monotonic() - stopped_s, 1))
            await _has_nodes(scene, 3)
            before, requests = len(first.proxy.writes), len(first.proxy.log)
            first.signal(signal.SIGCONT)
            # It wakes up with work to do, and with all that it missed on its way.
            await scene.merge("EnvPool", POOL, {"spec": {"replicas": 2}}, "scale")
            await scene.api_calls(lambda: len(first.proxy.log) > requests + 5)
            await _has_nodes(scene, 2)
            await scene.scenery.quiet(3.0)
            assert first.proxy.writes[before:] == [], "it writes although it does not lead"
            assert await _holder(scene) == "second"
            assert scene.problems() == []


async def test_p10_an_operator_that_ends_in_order_hands_over_at_once(lab: Lab) -> None:
    async with lab.scene() as scene, lab.acting(scene, "first") as first:
        await _led_by(scene, "first")
        async with lab.acting(scene, "second") as second:
            await scene.api_calls(lambda: len(second.proxy.log) > 5)
            first.signal(signal.SIGTERM)
            assert await lab.nursery.ended(first.pid) == 0
            assert await _holder(scene) in {"", "second"}
            await scene.create(pool(1))
            await _has_nodes(scene, 1)
            assert scene.problems() == []
