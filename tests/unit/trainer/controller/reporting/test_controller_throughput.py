"""What a controller tells of its steps, and how many engines it counts on."""

from collections.abc import Callable
from typing import Any

from etude.trainer.controller.progress import Throughput
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.controller.run import Run
from etude.v1 import journal_pb2, rollout_pb2, run_pb2


def sampled(tokens: int) -> journal_pb2.JournalRollout:
    costs = rollout_pb2.Costs(completion_tokens=tokens)
    return journal_pb2.JournalRollout(rollout=rollout_pb2.Rollout(costs=costs))


def test_the_first_step_counts_whole_and_later_ones_move_the_figures_towards_them() -> None:
    found = Throughput()
    found.record_step([sampled(600), sampled(400)], waited_s=10.0, worked_s=2.0)
    assert (found.tokens, found.wait_s, found.work_s) == (1_000, 10.0, 2.0)
    for _ in range(30):
        found.record_step([sampled(3_000)], waited_s=20.0, worked_s=4.0)
    status = run_pb2.RunStatus()
    found.write_status(status)
    figures = (status.step_tokens, status.wait_seconds, status.work_seconds)
    assert [round(each, 1) for each in figures] == [3_000.0, 20.0, 4.0]


def test_a_step_that_is_repeated_from_the_journal_says_nothing() -> None:
    found = Throughput()
    found.record_step([sampled(100)], waited_s=0.0, worked_s=2.0)
    assert found == Throughput()


async def test_a_run_tells_of_what_it_sampled(make_world: Callable[..., Any]) -> None:
    world = make_world()
    assert await world.train()
    status = world.runs[0].reporter.status
    assert status.step_tokens > 0
    assert status.wait_seconds > 0


async def test_an_order_for_engines_holds_from_the_next_version_on(
    make_world: Callable[..., Any],
) -> None:
    limits: list[int] = []

    def prepare(run: Run) -> None:
        order = run_pb2.ScaleEngines(replicas=3)
        run.commands.accept(run_pb2.CommandRequest(command_id="1", scale_engines=order))
        limits.append(run.publishing.engines.limit)

    world = make_world()
    assert await world.train(prepare)
    assert limits == [0]
    assert world.runs[0].reporter.status.engine_limit == 3


async def test_a_run_reports_the_lenders_that_it_knows(make_world: Callable[..., Any]) -> None:
    """The operator sends them again to a controller that does not."""

    def prepare(run: Run) -> None:
        lenders = run_pb2.SetLenders(targets=["coder-stable-0.coder-stable:7010"])
        run.commands.accept(run_pb2.CommandRequest(command_id="1", set_lenders=lenders))

    world = make_world()
    assert await world.train(prepare)
    status = world.runs[0].reporter.status
    assert list(status.lender_targets) == ["coder-stable-0.coder-stable:7010"]
    assert status.lent_engines == 0, "none of them is lent"


def test_of_many_targets_those_within_the_limit_are_wanted() -> None:
    engines = Engines(["a", "b", "c"], timeout_s=1.0)
    assert list(engines.expected) == ["a", "b", "c"]
    engines.limit = 2
    assert list(engines.expected) == ["a", "b"]


def test_an_engine_that_is_to_go_is_relied_on_until_it_has_left_rotation() -> None:
    """The operator takes its pod away once the report says so."""
    engines = Engines(["a", "b", "c"], timeout_s=1.0)
    assert engines.num_addressed == 0, "all of them"
    engines.limit, engines.rotation = 1, ("a", "c")
    assert engines.num_addressed == 3
    engines.rotation = ("a",)
    assert engines.num_addressed == 1
