"""Runs that reached their target, and runs that a gate holds."""

from typing import Any

from etude.v1 import run_pb2


async def test_a_run_that_reached_its_target_says_so(lab: Any, run_body: Any) -> None:
    lab.cluster.put(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=7)
    words = "phase rl reached its target at step 8"
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=8, reason="TargetReached", message=words)
    await lab.advance(10)
    assert lab.condition("Complete") == ("True", "TargetReached")
    assert lab.condition("Degraded") == ("False", "Healthy")
    assert lab.run().status.phase == "Succeeded"


async def test_a_gate_suspends_a_run_until_somebody_resumes_it(lab: Any, run_body: Any) -> None:
    lab.cluster.put(run_body())
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=39)
    await lab.tell_checkpoint(40)
    await lab.say(
        state=run_pb2.RUN_STATE_SUSPENDED, step=40, reason="GateNotMet", message="too low"
    )
    await lab.finish_jobs()
    await lab.advance(5)
    assert lab.condition("Suspended") == ("True", "GateNotMet")
    assert lab.run().status.hold.message == "too low"
    assert lab.names("Pod") == []
    lab.new_controller()
    resumed = run_body()
    resumed["metadata"]["annotations"] = {"etude.dev/resume": lab.run().status.hold.since}
    lab.cluster.put(resumed)
    await lab.settle()
    assert lab.pods("trainer")
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=40)
    assert lab.condition("Suspended") == ("False", "NotSuspended")
