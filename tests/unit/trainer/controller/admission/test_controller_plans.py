"""Plans reach the brokers of a run while it trains, and nothing waits for them."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.trainer.scripted_environments import Broker
from tests.support.vm.guests import until

from etude.common.rpc.server import Server
from etude.trainer.controller.admission import plans
from etude.trainer.controller.admission.groups import RolloutGroup
from etude.trainer.controller.admission.plans import PlanReporter, order_by_readiness
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.rollouts.tasks import Task
from etude.v1 import environments_pb2_grpc

MakeWorld = Callable[..., Any]


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    made = Broker()
    server = Server([])
    environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(made, server.grpc_server)
    await server.start()
    made.endpoint = f"127.0.0.1:{server.port}"
    yield made
    await server.stop(0)


async def test_a_run_reports_the_waves_of_its_next_steps(
    make_world: MakeWorld, broker: Broker
) -> None:
    world = make_world()
    planner = PlanReporter("run", {"repos": broker.endpoint}, {"repos": "python"})

    def plan_for(run: Any) -> None:
        run.plans = planner

    assert await world.train(plan_for)
    await asyncio.gather(*planner._reports.values())
    await planner.close()

    plans = [request.plan for request in broker.plans]
    assert plans
    assert {request.run_id for request in broker.plans} == {"run"}
    assert [plan.version for plan in plans] == sorted(plan.version for plan in plans)
    waves = [wave for plan in plans for wave in plan.waves]
    # Two prompts a step, three rollouts each.
    assert {(wave.template, wave.count) for wave in waves} == {("python", 6)}
    assert all(wave.start_s >= 0 for plan in plans for wave in plan.waves[:1])


async def test_environments_of_one_pool_are_planned_together(broker: Broker) -> None:
    """Its broker keeps one plan of a run: a second one would be taken for the first again."""
    templates = {"repos": "python", "web": "node"}
    planner = PlanReporter("run", dict.fromkeys(templates, broker.endpoint), templates)
    for _ in range(3):
        planner.report_wave([tasks("repos", "web", "web")], siblings=4)
    planner.report_step()
    await asyncio.gather(*planner._reports.values())
    await planner.close()
    newest = broker.plans[-1].plan
    assert {(wave.template, wave.count) for wave in newest.waves} == {("python", 4), ("node", 8)}
    versions = [request.plan.version for request in broker.plans]
    assert len(set(versions)) == len(versions)


async def test_a_broker_that_is_away_costs_a_run_one_warning(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    planner = PlanReporter("run", {"repos": "127.0.0.1:1"}, {"repos": "python"})

    def plan_for(run: Any) -> None:
        run.plans = planner

    with caplog.at_level(logging.WARNING):
        assert await world.train(plan_for)
        await asyncio.gather(*planner._reports.values())
    await planner.close()

    told = [r for r in caplog.records if "plan not delivered to the broker" in r.message]
    assert len(told) == 1


async def test_a_plan_is_confirmed_again_and_again_until_the_phase_is_over(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "REPEAT_S", 0.01)
    planner = PlanReporter("run", {"repos": broker.endpoint}, {"repos": "python"})
    for _ in range(3):
        planner.report_wave([tasks("repos")], siblings=4)
    planner.report_step()
    await until(lambda: len(broker.plans) >= 4)
    planner.begin_phase()
    await asyncio.gather(*planner._reports.values())
    told = len(broker.plans)
    await asyncio.sleep(0.1)

    assert len(broker.plans) == told
    await planner.close()


def tasks(*environments: str) -> list[Task]:
    return [
        Task(task_id=f"t/{n}", uri=f"file:///none/{n}", environment=name)
        for n, name in enumerate(environments)
    ]


async def told(planner: PlanReporter) -> None:
    """The planner has a rhythm, and its plan has been answered."""
    for _ in range(3):
        planner.report_wave([tasks("repos")], siblings=4)
    planner.report_step()
    await asyncio.gather(*planner._reports.values())


async def test_groups_whose_environments_are_there_ask_first(broker: Broker) -> None:
    tasks = tuple(
        Task(task_id=f"t/{n}", uri=f"file:///{n}", environment=name)
        for n, name in enumerate(["repos", "web", "repos", "web"])
    )
    order = TaskOrder(tasks=tasks, seed=0)
    groups = [
        RolloutGroup(
            group_id=str(n),
            phase="rl",
            position=n,
            task_id=order.task_at(n).task_id,
            seed=0,
            sequence=n,
        )
        for n in range(4)
    ]
    environments = [order.task_at(n).environment for n in range(4)]
    planner = PlanReporter("run", {"repos": broker.endpoint}, {"repos": "python"})
    assert order_by_readiness(planner, order, groups) == groups
    broker.ready_by_unix_ms = round(1000 * time.time()) + 3_600_000
    await told(planner)
    assert planner.ready_ms("repos") == broker.ready_by_unix_ms
    turn = [environments[group.position] for group in order_by_readiness(planner, order, groups)]
    assert turn == ["web", "web", "repos", "repos"]
    broker.ready_by_unix_ms = 1
    await told(planner)
    assert order_by_readiness(planner, order, groups) == groups
    await planner.close()


async def test_what_a_broker_said_counts_as_long_as_it_answers(broker: Broker) -> None:
    planner = PlanReporter("run", {"repos": broker.endpoint}, {"repos": "python"})
    broker.ready_by_unix_ms = round(1000 * time.time()) + 3_600_000
    await told(planner)
    assert planner.ready_ms("repos")
    planner.brokers = {"repos": "127.0.0.1:1"}
    await told(planner)
    assert planner.ready_ms("repos") == 0
    await planner.close()


async def test_the_images_of_the_next_tasks_are_planned_before_there_is_a_rhythm(
    broker: Broker, tmp_path: Path
) -> None:
    digests = {name: f"sha256:{name * 64}" for name in "ab"}
    coming = []
    for number, image in enumerate([f"ghcr.io/x/y@{digests['a']}", "by-name", "", "twice"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = f'[metadata]\netude_image = "{image}"\n' if image else "# none\n"
        (folder / "task.toml").write_text(text)
        coming.append(Task(task_id=f"t/{number}", uri=folder.as_uri(), environment="repos"))
    (tmp_path / "3/task.toml").write_text("[metadata]\nno toml")
    planner = PlanReporter("run", {"repos": broker.endpoint}, {"repos": "python"})
    following = [coming[:2], [*coming[2:], coming[0]]]
    planner.report_wave(following, siblings=4)
    await until(lambda: len(broker.plans) >= 1)
    plan = broker.plans[-1].plan
    assert not plan.waves
    for _ in range(2):
        planner.report_wave(following, siblings=4)
    await until(lambda: bool(broker.plans[-1].plan.waves))
    waves = broker.plans[-1].plan.waves
    assert [(wave.count, wave.with_image) for wave in waves] == [(8, 4), (12, 4)]
    await planner.close()
    assert [(each.template, each.image) for each in plan.images] == [
        ("python", f"ghcr.io/x/y@{digests['a']}")
    ]
