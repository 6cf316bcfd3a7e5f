"""Budget of a run, cleanup after its end, and managedBy."""

from collections.abc import Callable
from typing import Any

import pytest

from etude.common.api.kinds import RLRun
from etude.operator.actions import ClockReading
from etude.operator.manifests import Ref
from etude.operator.runs.lifecycle import limits
from etude.v1 import environments_pb2, run_pb2

Build = Callable[..., dict[str, Any]]
HOUR = 3600.0


async def begin(lab: Any, body: dict[str, Any]) -> None:
    """Two engines of one GPU each run on nodes, and the controller reports."""
    lab.cluster.upsert(body)
    await lab.settle()
    for role in ("trainer", "inference", "rewards"):
        for pod in lab.pods(role):
            lab.cluster.upsert({**pod, "spec": {**pod["spec"], "nodeName": "node-1"}})
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=1)


async def work(lab: Any, seconds: float) -> None:
    """Time passes in which steps finish."""
    for _ in range(int(seconds // 100)):
        await lab.advance(100)
        lab.step = getattr(lab, "step", 1) + 1
        await lab.say(state=run_pb2.RUN_STATE_RUNNING, step=lab.step)


async def test_gpus_are_accounted_for_as_long_as_pods_hold_them(lab: Any, run_body: Build) -> None:
    await begin(lab, run_body())
    await work(lab, 1000)
    usage = lab.run().status.usage
    assert usage.gpus == 2
    assert usage.gpu_seconds == pytest.approx(2000, abs=250)


@pytest.mark.parametrize(
    ("pod", "held"),
    [
        ({"spec": {"nodeName": "n"}, "metadata": {}}, 1),
        ({"spec": {"nodeName": "n"}, "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, 1),
        ({"spec": {}, "metadata": {}}, 0),
        ({"spec": {"nodeName": "n"}, "metadata": {}, "status": {"phase": "Failed"}}, 0),
    ],
    ids=["on a node", "on its way out", "without a node", "over"],
)
def test_a_gpu_counts_while_nobody_else_can_have_it(
    run: RLRun, pod: dict[str, Any], held: int
) -> None:
    assert limits.account_usage(run, {"inference": [pod]}, 0, ClockReading(0.0, 0.0)).gpus == held


async def test_an_operator_that_dies_loses_nothing_of_the_account(
    lab: Any, run_body: Build
) -> None:
    await begin(lab, run_body())
    await work(lab, 500)
    await lab.kill()
    lab.new_controller()
    await lab.advance(500)
    assert lab.run().status.usage.gpu_seconds == pytest.approx(2000, abs=250)


async def test_a_run_at_rest_uses_nothing_and_writes_nothing(lab: Any, run_body: Build) -> None:
    await begin(lab, run_body())
    lab.cluster.upsert(run_body(suspend=True))
    await lab.settle()
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    used = lab.run().status.usage
    assert (used.gpus, used.accounted_at) == (0, None)
    written = len(lab.writes)
    for _ in range(5):
        await lab.advance(600)
    assert lab.run().status.usage == used
    assert len(lab.writes) == written


async def test_a_clock_that_is_set_back_gives_nothing_back(lab: Any, run_body: Build) -> None:
    await begin(lab, run_body())
    await work(lab, 500)
    before = lab.run().status.usage.gpu_seconds
    lab.clock.offset_s -= HOUR
    await work(lab, 300)
    assert before + 400 <= lab.run().status.usage.gpu_seconds <= before + 800


async def test_a_spent_budget_saves_and_suspends_until_it_is_raised(
    lab: Any, run_body: Build
) -> None:
    await begin(lab, run_body(budget={"gpuHours": "0.5"}))
    await work(lab, 800)
    assert lab.run().status.hold is None
    await lab.advance(101)
    assert lab.run().status.hold.reason == "BudgetExceeded"
    assert lab.condition("Suspended") == ("False", "Suspending")
    await lab.say(state=run_pb2.RUN_STATE_SUSPENDED, step=5)
    assert lab.condition("Suspended") == ("True", "BudgetExceeded")
    assert lab.names("Pod") == []

    lab.new_controller()
    lab.cluster.upsert(run_body(budget={"gpuHours": "0.6"}))
    await lab.settle()
    assert lab.run().status.hold is None
    assert len(lab.pods("trainer")) == 1


async def lease(lab: Any, mine: int, others: int = 0) -> None:
    """The broker of the run's pool tells who holds what."""
    by_run = {lab.run().metadata.uid: mine, "another": others}
    said = environments_pb2.WatchPoolResponse(
        sequence=mine + others + 1, leased=mine + others, leased_by_run=by_run
    )
    lab.peers.pools["demo-repos-broker-0.demo-repos-broker:7020"].append(said)
    await lab.settle()
    await lab.advance(5)


async def test_environments_are_accounted_for_by_what_the_run_itself_leases(
    lab: Any, run_body: Build
) -> None:
    await begin(lab, run_body())
    await lease(lab, 10, others=50)
    await work(lab, 1000)
    usage = lab.run().status.usage
    assert usage.sandboxes == 10
    assert usage.sandbox_seconds == pytest.approx(10_000, abs=1_250)
    await lease(lab, 0, others=50)
    await work(lab, 100)
    used = lab.run().status.usage
    await work(lab, 500)
    assert lab.run().status.usage.sandbox_seconds == used.sandbox_seconds


async def test_spent_hours_of_environments_suspend_the_run(lab: Any, run_body: Build) -> None:
    await begin(lab, run_body(budget={"sandboxHours": "1", "gpuHours": "900"}))
    await lease(lab, 10)
    await work(lab, 300)
    assert lab.run().status.hold is None
    await lab.advance(60)
    hold = lab.run().status.hold
    assert (hold.reason, hold.message) == (
        "BudgetExceeded",
        "budget.sandboxHours 1 is spent; raise it to go on",
    )


async def finish(lab: Any) -> None:
    await lab.say(state=run_pb2.RUN_STATE_DONE, step=40)
    await lab.settle()
    assert lab.condition("Complete")[0] == "True"


async def test_a_run_goes_with_all_that_it_owns_so_long_after_its_end(
    lab: Any, run_body: Build
) -> None:
    await begin(lab, run_body(ttlSecondsAfterFinished=600))
    await finish(lab)
    await lab.advance(599)
    assert lab.names("RLRun") == ["demo"]
    await lab.advance(2)
    assert lab.names("RLRun") == []


async def test_without_a_rule_a_run_that_is_over_stays(lab: Any, run_body: Build) -> None:
    await begin(lab, run_body())
    await finish(lab)
    await lab.advance(1_000_000)
    assert lab.names("RLRun") == ["demo"]
    assert lab.names("StatefulSet")


async def test_what_goes_after_the_end_goes_in_steps(lab: Any, run_body: Build) -> None:
    rules = [
        {"after": "Complete", "policy": "DeletePools"},
        {"after": "Complete", "policy": "DeleteRoles", "ttlSeconds": 60},
        {"after": "Failed", "policy": "DeleteSelf", "ttlSeconds": 1},
        {"after": "Complete", "policy": "DeleteSelf", "ttlSeconds": 600},
    ]
    await begin(lab, run_body(deletionRules=rules))
    await finish(lab)
    assert lab.names("EnvPool") == []
    assert "demo-trainer" in lab.names("StatefulSet")
    await lab.advance(61)
    assert lab.names("StatefulSet") == []
    assert [name for name in lab.names("Service") if name.startswith("demo-")] == []
    assert lab.names("RLRun") == ["demo"]
    await lab.advance(540)
    assert lab.names("RLRun") == []


def test_one_way_to_say_when_a_run_goes_is_enough(run_body: Build) -> None:
    both = {
        "ttlSecondsAfterFinished": 1,
        "deletionRules": [{"after": "Failed", "policy": "DeleteSelf"}],
    }
    with pytest.raises(ValueError, match="exclude each other"):
        RLRun.model_validate(run_body(**both))


async def test_a_run_of_another_manager_is_left_alone(lab: Any, run_body: Build) -> None:
    lab.cluster.upsert(run_body(managedBy="kueue.x-k8s.io/multikueue"))
    await lab.settle()
    await lab.advance(600)
    assert lab.writes == []
    assert [key for key in lab.cluster.objects() if key != Ref("RLRun", "lab", "demo")] == []
