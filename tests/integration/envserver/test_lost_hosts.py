"""A node killed in the middle of an episode changes neither its transcript nor its grade."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments.pool_processes import Processes
from tests.support.trainer.lost_environments import Episodes, episodes_of
from tests.support.vm import guests

from etude.agent.replay import DivergedError
from etude.agent.tool_calls import ToolCall
from etude.common.errors import UnavailableError
from etude.trainer.rollouts.failover import FailoverEnvironment
from etude.v1 import environments_pb2

Call = tuple[str, Mapping[str, str]]

FIX: Call = (
    "search_replace",
    {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"},
)
READ: Call = ("read_file", {"path": "shop/core.py"})
TEST: Call = ("run_terminal", {"command": "pytest -q"})
EPISODE: Sequence[Sequence[Call]] = (
    (READ, ("list_dir", {})),
    (TEST,),
    (FIX, READ),
    (("run_terminal", {"command": "echo one >> notes && cat notes"}),),
    (("run_terminal", {"command": "echo two >> notes; sleep 2; cat notes"}),),
    (TEST, ("grep", {"pattern": "return"})),
)
JOB = environments_pb2.GradeJob(
    files=[environments_pb2.WorkspaceFile(path="test.sh", content=b"cat notes > /logs/reward")],
    command="sh /tests/test.sh",
    timeout_seconds=30,
    reward_path="/logs/reward",
)


def calls(turn: int) -> list[ToolCall]:
    return [
        ToolCall(f"{turn}.{place}", name, json.dumps(arguments))
        for place, (name, arguments) in enumerate(EPISODE[turn])
    ]


async def played(
    environment: FailoverEnvironment, turns: Sequence[int], told: list[str]
) -> list[str]:
    for turn in turns:
        told += [outcome.content for outcome in await environment.run(calls(turn))]
    return told


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    made.add_node("other")
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


@pytest.fixture
async def episodes(
    driver: Any, processes: Processes, connect: Callable[..., Any], source: str
) -> AsyncIterator[Episodes]:
    roles = ("broker", "node", "node-other")
    for role in roles:
        processes.start(role)
    for role in roles:
        await processes.ready(role)
    pool = connect(f"127.0.0.1:{processes.ports['broker']}", source)
    async with episodes_of(pool) as made:
        yield made


def kill_node_of(processes: Processes, environment: FailoverEnvironment) -> None:
    port = int(environment.lease.endpoint.rpartition(":")[2])
    (role,) = (role for role, taken in processes.ports.items() if taken == port)
    processes.kill(role)


async def begun_on_disk(processes: Processes, lease_id: str) -> None:
    """Wait until the command of the fifth turn has had its first effect."""

    def holds() -> bool:
        found = processes.folder.rglob(f"{lease_id}/**/notes")
        return any("two" in path.read_text() for path in found)

    await guests.until(holds)


async def graded(
    episodes: Episodes, environment: FailoverEnvironment
) -> tuple[environments_pb2.WorkspaceDiff, bytes]:
    diff = environments_pb2.WorkspaceDiff.FromString(await environment.diff())
    job = environments_pb2.GradeJob()
    job.CopyFrom(JOB)
    job.diff.CopyFrom(diff)
    answer = await episodes.pool.grade(environment.lease, job)
    return diff, answer.reward_file


async def test_an_episode_whose_host_is_killed_ends_like_one_that_nobody_disturbed(
    processes: Processes, episodes: Episodes
) -> None:
    every = range(len(EPISODE))
    calm = await episodes.begin("calm")
    wanted = await played(calm, every, [])
    outcome = await graded(episodes, calm)

    environment = await episodes.begin("disturbed")
    told = await played(environment, every[:4], [])
    first = environment.lease
    working = asyncio.create_task(played(environment, every[4:], told))
    await begun_on_disk(processes, first.lease_id)
    kill_node_of(processes, environment)

    assert await working == wanted
    assert await graded(episodes, environment) == outcome
    assert outcome[1] == b"one\ntwo\n"
    assert environment.lease.endpoint != first.endpoint
    tally = environment.tally
    assert (tally.lost, tally.recovered) == (1, 1)
    # Two tests, one edit, one command: what only reads was answered from the log.
    assert tally.replayed == 3


async def test_an_episode_that_cannot_be_made_again_the_same_is_a_fault_of_the_platform(
    processes: Processes, episodes: Episodes
) -> None:
    environment = await episodes.begin("random")
    draw = ToolCall("0", "run_terminal", '{"command": "head -c 16 /dev/urandom | md5sum"}')
    await environment.run([draw])
    kill_node_of(processes, environment)

    with pytest.raises(DivergedError, match="call 0"):
        await environment.run(calls(0))


async def test_a_pool_whose_last_host_is_killed_gives_up_in_time(
    processes: Processes, episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.trainer.rollouts.failover.PLACEMENT_S", 2.0)
    environment = await episodes.begin("alone")
    known = await environment.run(calls(0))
    processes.kill("node")
    processes.kill("node-other")

    with pytest.raises(UnavailableError, match="no replacement was available"):
        await environment.run(calls(1))
    assert await environment.run(calls(0)) == known
