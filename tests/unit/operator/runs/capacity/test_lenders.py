"""A run's controller is told of the engines that routes may lend to it."""

from typing import Any

import pytest

from etude.common.api.kinds import RLRun
from etude.operator.manifests import Ref
from etude.v1 import run_pb2

ENGINES = [f"coder-stable-{number}.coder-stable:7010" for number in range(2)]


@pytest.fixture
async def running(lab: Any, run_body: Any) -> Any:
    lab.cluster.upsert(run_body())
    await lab.settle()
    await say(lab)
    return lab


async def say(lab: Any, *lenders: str, version: int = 0, lent: int = 0) -> None:
    await lab.say(
        state=run_pb2.RUN_STATE_RUNNING,
        policy_version=version,
        lender_targets=lenders,
        lent_engines=lent,
    )
    await lab.advance(5)


def told(lab: Any) -> list[list[str]]:
    orders: dict[str, list[str]] = {
        each.command_id: list(each.set_lenders.targets)
        for each in lab.peers.commands
        if each.HasField("set_lenders")
    }
    return list(orders.values())


async def lend(lab: Any, route_body: Any, **changes: Any) -> None:
    lending = {"stable": {"replicas": 2}, "lending": {"turnsPerEngine": 8}, **changes}
    lab.cluster.upsert(route_body(channels=lending))
    await lab.settle()


async def test_a_controller_is_told_once_of_the_engines_of_a_route_that_lends(
    running: Any, route_body: Any
) -> None:
    await lend(running, route_body)
    await say(running)
    assert told(running) == [ENGINES]
    await say(running, *ENGINES, lent=1)
    await say(running, *ENGINES, version=3, lent=1)
    assert told(running) == [ENGINES]
    status = RLRun.parse_known_fields(running.cluster.objects()[Ref("RLRun", "lab", "demo")]).status
    assert status.lent_engines == 1


async def test_a_controller_that_has_started_again_is_told_again(
    running: Any, route_body: Any
) -> None:
    await lend(running, route_body)
    await say(running, *ENGINES)
    before = len(told(running))
    await say(running, version=2)
    assert told(running)[before:] == [ENGINES]


@pytest.mark.parametrize("how", ["without lending", "of another run"])
async def test_engines_of_other_routes_are_left_to_their_users(
    running: Any, route_body: Any, how: str
) -> None:
    if how == "without lending":
        running.cluster.upsert(route_body())
    else:
        body = route_body(channels={"stable": {}, "lending": {"turnsPerEngine": 8}})
        body["spec"]["runRef"] = {"name": "other"}
        running.cluster.upsert(body)
    await running.settle()
    await say(running)
    assert told(running) == []


async def test_a_route_that_lends_no_longer_is_taken_off_the_list(
    running: Any, route_body: Any
) -> None:
    await lend(running, route_body)
    await say(running, *ENGINES, version=1)
    running.cluster.upsert(route_body(channels={"stable": {"replicas": 2}}))
    await running.settle()
    await say(running, *ENGINES, version=2)
    assert told(running)[-1] == []
