"""How long machines of leases live: longer than a daemon that dies, no longer than its pod."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from tests.support.environments import served_pools
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import START_TIMEOUT_S, Processes

from etude.envserver.drivers.process_identity import MARK
from etude.envserver.images.built_image import BuiltImage

EDIT = {"path": "greet.sh", "old_string": "helo", "new_string": "hello"}

_T = TypeVar("_T")


@pytest.fixture
def processes(image: BuiltImage, tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    made.write_pool("Process", "Trusted", driver="QemuMicroVM", image=image.folder.as_uri())
    made.start("broker")
    with (tmp_path / "node.log").open("ab") as log:
        made.running["node"] = subprocess.Popen(
            [sys.executable, "-m", "etude.envserver.main", "supervise"],
            env=made.environment("node"),
            stderr=log,
        )
    yield made
    for role in made.running:
        made.kill(role)


@pytest.fixture
async def pool(processes: Processes, tmp_path: Path) -> AsyncIterator[Pool]:
    async with served_pools.serving(processes, served_pools.greeting(tmp_path)) as made:
        yield made


def living(mark: str, program: str) -> list[int]:
    """Processes with this in their environment, by what they run. They have a /proc of their own,
    so they are looked for as anybody's."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            is_marked = mark.encode() in (folder / "environ").read_bytes()
            if is_marked and any(word.endswith(program) for word in words):
                found.append(int(folder.name))
    return found


def machines(processes: Processes) -> list[int]:
    """Those of leases, without the one that others are split off from."""
    return living(f"{MARK}={processes.folder / 'scratch' / 'leases'}", "qemu-system-x86_64")


async def answered(work: Callable[[], Awaitable[_T]]) -> _T:
    """What a client does while a node is away: the same call again.

    Raises:
        AioRpcError: the node is there and refuses.
    """
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                return await work()
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)


async def test_leases_go_on_in_their_vms_when_the_daemon_is_killed(
    processes: Processes, pool: Pool
) -> None:
    one, other, third = await pool.launch("a", 3)
    edit = ("1", "search_replace", EDIT)
    assert await pool.turn(one, edit) == ["ok"]
    assert await pool.turn(one, ("2", "run_terminal", {"command": "echo mine > /tmp/mine"})) == [
        "(no output)"
    ]
    assert await pool.turn(other, ("1", "read_file", {"path": "greet.sh"})) == ["echo helo"]
    before = machines(processes)
    assert len(before) == 2
    waiting = ("3", "run_terminal", {"command": "sleep 2; sh greet.sh"})
    in_call = asyncio.create_task(answered(lambda: pool.turn(other, waiting)))
    await asyncio.sleep(0.5)

    (daemon,) = living(f"ETUDE_SCRATCH={processes.folder / 'scratch'}", "node")
    os.kill(daemon, signal.SIGKILL)

    assert await answered(lambda: pool.turn(one, edit)) == ["ok"]
    assert machines(processes) == before
    looking = ("3", "run_terminal", {"command": "sh greet.sh; cat /tmp/mine"})
    assert await pool.turn(one, looking) == ["hello\nmine"]
    assert await in_call == ["helo"]
    assert await pool.turn(third, ("1", "run_terminal", {"command": "sh greet.sh"})) == ["helo"]
    assert [file.path for file in (await pool.diff(one)).written] == ["greet.sh"]
    assert "adopted 2 of 2 VMs" in processes.log("node")


async def test_a_lease_whose_vm_dies_is_lost_and_its_slot_is_free(
    processes: Processes, pool: Pool
) -> None:
    leases = await pool.launch("a", 4)  # all there are
    assert await pool.turn(leases[0], ("1", "run_terminal", {"command": "sh greet.sh"})) == ["helo"]
    run = ("2", "run_terminal", {"command": "sleep 1000"})
    in_call = asyncio.create_task(pool.turn(leases[0], run))
    await asyncio.sleep(0.5)
    (machine,) = machines(processes)
    os.kill(machine, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await in_call
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pool.turn(leases[0], run)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    (other,) = await pool.launch("b")
    assert await pool.turn(other, ("1", "run_terminal", {"command": "sh greet.sh"})) == ["helo"]


async def test_a_pod_that_is_killed_leaves_no_vm(processes: Processes, pool: Pool) -> None:
    scratch = processes.folder / "scratch"
    (lease,) = await pool.launch("a")
    await pool.turn(lease, ("1", "run_terminal", {"command": "true"}))
    assert machines(processes)

    processes.kill("node")

    async with asyncio.timeout(START_TIMEOUT_S):
        while rest(scratch):  # noqa: ASYNC110 - looked at as a person would
            await asyncio.sleep(0.05)


def rest(scratch: Path) -> list[int]:
    return [*living(f"{MARK}={scratch}", ""), *living(f"ETUDE_SCRATCH={scratch}", "node")]
