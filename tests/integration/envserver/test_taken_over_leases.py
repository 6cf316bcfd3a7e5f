"""Environments that another worker takes over: real broker, real node, real sandboxes."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.environments.pool_client import Pool
from tests.support.trainer.lost_environments import Episodes, episodes_of

from etude.agent.tool_calls import ToolCall
from etude.agent.turns import to_json
from etude.trainer.rollouts.failover import FailoverEnvironment

EDIT = {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"}
FIX = ToolCall("0.0", "search_replace", to_json(EDIT))
TEST = ToolCall("1.0", "run_terminal", to_json({"command": "pytest -q"}))
SPOIL = ToolCall("1.1", "run_terminal", to_json({"command": "echo x > shop/core.py"}))


@pytest.fixture
async def episodes(pool: Pool) -> AsyncIterator[Episodes]:
    async with episodes_of(pool) as made:
        yield made


def take_over(
    episodes: Episodes, former: FailoverEnvironment, known: set[str]
) -> FailoverEnvironment:
    """The environment as another worker has it, which knows these calls."""
    client = episodes.environment(former.lease)
    client.known = known
    return FailoverEnvironment(episodes.leases, episodes, former.log, episodes.outage, client)


async def test_a_worker_that_knows_all_calls_goes_on_in_the_environment(
    episodes: Episodes,
) -> None:
    former = await episodes.begin("a")
    await former.run([FIX])
    successor = take_over(episodes, former, {FIX.call_id})
    [tested] = await successor.run([TEST])
    assert "1 passed" in tested.content
    assert successor.lease.lease_id == former.lease.lease_id
    assert b"a + b" in await successor.diff()


async def test_calls_that_a_dead_worker_did_not_record_are_not_taken_over(
    episodes: Episodes,
) -> None:
    former = await episodes.begin("a")
    await former.run([FIX])
    await former.current.run([SPOIL])  # and the worker died before it recorded that
    successor = take_over(episodes, former, {FIX.call_id})
    [tested] = await successor.run([TEST])
    assert "1 passed" in tested.content
    assert successor.lease.lease_id != former.lease.lease_id
    assert (successor.tally.lost, successor.tally.replayed) == (1, 1)


async def test_calls_of_a_worker_that_was_thought_dead_reach_no_diff(
    episodes: Episodes,
) -> None:
    former = await episodes.begin("a")
    await former.run([FIX])
    successor = take_over(episodes, former, {FIX.call_id})
    await successor.run([TEST])
    await former.current.run([SPOIL])
    changes = await successor.diff()
    assert b"a + b" in changes
    assert successor.lease.lease_id != former.lease.lease_id


async def test_a_call_under_way_is_awaited_and_not_run_again(episodes: Episodes) -> None:
    slow = ToolCall("0.0", "run_terminal", to_json({"command": "echo one >> notes; sleep 1"}))
    show = ToolCall("1.0", "run_terminal", to_json({"command": "cat notes"}))
    former = await episodes.begin("a")
    running = asyncio.create_task(former.current.run([slow]))
    await asyncio.sleep(0.3)
    running.cancel()
    successor = take_over(episodes, former, set())
    await successor.run([slow])
    [shown] = await successor.run([show])
    assert shown.content.split().count("one") == 1
    assert successor.lease.lease_id == former.lease.lease_id
