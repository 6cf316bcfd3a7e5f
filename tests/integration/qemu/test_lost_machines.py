"""A machine that is killed in the middle of an episode is made again by the calls of it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.environments import served_pools
from tests.support.environments.pool_processes import Processes
from tests.support.trainer.lost_environments import Episodes, episodes_of

from etude.agent.tool_calls import ToolCall
from etude.common.rpc import channels
from etude.envserver.images.built_image import BuiltImage
from etude.trainer.rollouts.failover import FailoverEnvironment
from etude.v1 import (
    environment_access_pb2,
    environment_access_pb2_grpc,
)

LIMIT_S = 60.0
EDIT = {"path": "greet.sh", "old_string": "helo", "new_string": "hello"}
COMMAND = "sh greet.sh > said; cat said"


@pytest.fixture
def processes(image: BuiltImage, tmp_path: Path) -> Iterator[Processes]:
    with served_pools.of_machines(tmp_path, image) as made:
        yield made


@pytest.fixture
async def episodes(processes: Processes, tmp_path: Path) -> AsyncIterator[Episodes]:
    source = served_pools.greeting(tmp_path)
    async with served_pools.serving(processes, source) as pool, episodes_of(pool) as made:
        yield made


def call(call_id: str, name: str, **arguments: str) -> Sequence[ToolCall]:
    return [ToolCall(call_id, name, json.dumps(arguments))]


@contextlib.asynccontextmanager
async def until_there(environment: FailoverEnvironment, path: str) -> AsyncIterator[None]:
    """End the block once there is a file, as a program in the machine itself sees it.

    The program starts before the block: beside a turn that is under way none does.
    """
    lease = environment.lease
    waits = environment_access_pb2.ExecOpen(
        lease_id=lease.lease_id,
        control_token=lease.control_token,
        shell=f"until [ -e {path} ]; do sleep 0.1; done",
    )
    async with channels.dial(lease.endpoint) as channel:
        access = environment_access_pb2_grpc.EnvAccessServiceStub(channel)
        call = access.Exec(iter([environment_access_pb2.ExecRequest(open=waits)]), timeout=LIMIT_S)
        started = await anext(aiter(call))
        assert started.HasField("started")
        yield
        said = [response async for response in call]
    assert said[-1].exit.exit_code == 0


async def test_an_episode_whose_vm_is_killed_goes_on_in_another(
    processes: Processes, episodes: Episodes
) -> None:
    environment = await episodes.begin("a")
    await environment.run(call("1", "search_replace", **EDIT))
    await environment.run(call("2", "read_file", path="greet.sh"))
    (said,) = await environment.run(call("3", "run_terminal", command=COMMAND))
    assert said.content == "hello"
    first = environment.lease.lease_id

    # In the first machine it ends with that machine, and in the next one by itself.
    slowly = f'cat said said > twice; [ "$(uname -n)" = {first} ] && sleep 600; cat twice'
    async with until_there(environment, "twice"):
        turn = environment.run(call("4", "run_terminal", command=slowly))
        working = asyncio.create_task(turn)
    assert not working.done()
    processes.end_machines()

    assert [outcome.content for outcome in await working] == ["hello\nhello"]
    assert environment.lease.lease_id != first
    tally = environment.tally
    assert (tally.recovered, tally.replayed) == (1, 2)
