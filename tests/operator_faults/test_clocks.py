"""Operators whose clocks are an hour apart."""

import pytest
from tests.operator_faults.lab import Lab
from tests.operator_faults.stories import References, told
from tests.operator_faults.workloads import RUN, UPDATE, phase, store, supervised

HOUR_S = 3_600.0


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
async def test_p15_an_operator_whose_clock_is_an_hour_off_comes_to_the_same_end(
    lab: Lab, references: References, ahead_s: float
) -> None:
    async with told(lab, UPDATE, references) as story:
        await story.operator.kill()
        story.scene.clock_s = ahead_s
        await story.operator.start()
        await UPDATE.act(story.scene)
        await story.reaches_the_reference()


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
async def test_p15_no_deadline_passes_because_the_next_operator_has_another_clock(
    lab: Lab, ahead_s: float
) -> None:
    async with lab.scene() as scene, lab.acting(scene) as operator:
        limits = {"activeSeconds": 1_800, "preRunningSeconds": 1_800}
        await scene.create(supervised(deadlines=limits, ttlSecondsAfterFinished=1_800))
        await scene.until(lambda: phase(scene) == "Running")
        await operator.kill()
        scene.clock_s = ahead_s
        await operator.start()
        seen = scene.get("RLRun", RUN)["metadata"]["resourceVersion"]
        await scene.merge("RLRun", RUN, {"spec": {"checkpointing": {"keepLast": 5}}})
        await scene.until(lambda: "configure" in store(scene).orders)
        await scene.until(lambda: scene.get("RLRun", RUN)["metadata"]["resourceVersion"] != seen)
        # It may look anew before it has heard anything; from a deadline there would be no way back.
        await scene.until(lambda: phase(scene) == "Running")
        store(scene).may_finish.set()
        await scene.until(lambda: scene.holds("RLRun", RUN, "Complete"))
        await operator.kill()
        scene.clock_s = -ahead_s
        await operator.start()
        await scene.api_calls(lambda: len(operator.proxy.log) > 0)
        await scene.scenery.quiet(3.0)
        assert scene.holds("RLRun", RUN, "Complete"), "deleted 1,800 s too early"
        assert scene.problems() == []
