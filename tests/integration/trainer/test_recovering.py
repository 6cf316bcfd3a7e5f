"""An environment that is made again: what is run where, and whose time that is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.environments.pool_client import Pool
from tests.support.free_ports import reserve_port
from tests.support.trainer.lost_environments import Episodes, episodes_of

from etude.agent import replay
from etude.agent.tool_calls import ToolCall
from etude.common.errors import UnavailableError
from etude.common.rpc import channels
from etude.trainer.rollouts import failover, sandbox_client
from etude.trainer.rollouts.failover import FailoverEnvironment
from etude.trainer.rollouts.sandbox_client import EnvironmentLostError
from etude.v1 import environments_pb2_grpc

WRITE = ToolCall("1", "search_replace", "{}")
READ = ToolCall("2", "read_file", "{}")
RUN = ToolCall("3", "run_terminal", "{}")


@pytest.fixture
async def episodes(partners: Any) -> AsyncIterator[Episodes]:
    async with channels.dial(partners.target) as channel:
        broker = environments_pb2_grpc.EnvBrokerServiceStub(channel)
        watch = environments_pb2_grpc.PoolServiceStub(channel)
        async with episodes_of(Pool(broker, watch, "file:///task")) as made:
            yield made


async def begun(episodes: Episodes) -> FailoverEnvironment:
    environment = await episodes.begin("a")
    await environment.run([WRITE, READ])
    return environment


async def test_only_what_may_have_changed_something_is_run_again(
    episodes: Episodes, partners: Any
) -> None:
    environment = await begun(episodes)
    partners.node.losses = 1

    await environment.run([RUN])

    assert partners.node.ran[2:] == [("a/1/0", "1"), ("a/1/0", "3")]
    assert await environment.run([READ, RUN]) == await environment.run([READ, RUN])
    assert len(partners.node.ran) == 4


async def test_a_host_that_is_away_is_waited_for_until_the_broker_says_that_the_lease_is_gone(
    episodes: Episodes, partners: Any
) -> None:
    environment = await begun(episodes)
    partners.node.refusals = 2
    await environment.run([RUN])
    assert (environment.lease.lease_id, environment.tally.lost) == ("a/0", 0)

    partners.node.refusals = 1
    partners.broker.missing = {"a/0"}
    await environment.run([ToolCall("4", "read_file", "{}")])
    assert (environment.lease.lease_id, environment.tally.lost) == ("a/1/0", 1)


async def test_a_host_that_the_broker_hears_at_another_address_is_given_up(
    episodes: Episodes, partners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = await begun(episodes)
    monkeypatch.setattr(sandbox_client, "OUT_OF_REACH_S", 0.0)
    port = reserve_port()
    async with channels.dial(f"127.0.0.1:{port}") as nowhere:
        environment.current.node = environments_pb2_grpc.EnvNodeServiceStub(nowhere)
        await environment.run([RUN])

    assert (environment.lease.lease_id, environment.tally.lost) == ("a/1/0", 1)
    assert partners.node.ran[2:] == [("a/1/0", "1"), ("a/1/0", "3")]


async def test_who_is_interrupted_in_a_replay_begins_it_again_and_loses_no_time(
    episodes: Episodes, partners: Any
) -> None:
    environment = await begun(episodes)
    partners.node.refusals = 1_000_000
    partners.broker.missing = {"a/0"}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await environment.run([RUN])
    assert environment.lease.lease_id == "a/1/0"
    assert environment.outage.lost_s > 0
    partners.node.refusals = 0

    assert await environment.diff() == b"the diff"

    # The turn that was cut off was the policy's, and belongs to what it leaves.
    assert partners.node.ran[2:] == [("a/2/0", "1"), ("a/2/0", "3")]


async def test_an_environment_that_is_lost_again_and_again_is_given_up(
    episodes: Episodes, partners: Any
) -> None:
    environment = await begun(episodes)
    partners.node.losses = 1_000
    with pytest.raises(EnvironmentLostError, match="lost 4 times"):
        await environment.run([RUN])
    assert environment.tally.recovered == 0


async def test_an_environment_that_was_called_too_much_is_not_made_again(
    episodes: Episodes, partners: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = await begun(episodes)
    monkeypatch.setattr(replay, "MAX_LOG_BYTES", 1)
    partners.node.losses = 1
    with pytest.raises(UnavailableError, match="call log is too long"):
        await environment.run([RUN])


async def test_every_lease_on_the_way_is_given_back(episodes: Episodes, partners: Any) -> None:
    environment = await begun(episodes)
    partners.node.losses = 2
    await environment.run([RUN])
    assert failover.MAX_TRIES >= 2
    episodes.leases.release([environment.lease.lease_id])
    await episodes.leases.close()
    granted = {lease.lease_id for each in partners.broker.granted.values() for lease in each}
    assert set(partners.broker.released) == granted == {"a/0", "a/1/0", "a/2/0"}
