"""A pool whose node is a process and whose environments are machines: leases, tools, grades."""

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.environments import served_pools
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import Processes
from tests.support.vm import microvms

from etude.envserver.images import built_image
from etude.envserver.images.built_image import BuiltImage
from etude.v1 import environments_pb2

READY_LOOKS = 300
"""A minute, for two heartbeats and a restore on a machine that others use too."""
EDIT = {"path": "greet.sh", "old_string": "helo", "new_string": "hello"}
VERIFIER = b"sh /workspace/greet.sh | grep -qx hello && printf 1 > /logs/reward.txt\n"


@pytest.fixture(scope="module")
def own_image(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> BuiltImage:
    """A copy, because tests that run beside these hold the one in the cache."""
    folder = tmp_path_factory.mktemp("images") / image.folder.name
    shutil.copytree(image.folder, folder)
    return built_image.read_image(folder)


@pytest.fixture
def processes(own_image: BuiltImage, tmp_path: Path) -> Iterator[Processes]:
    with served_pools.of_machines(tmp_path, own_image) as made:
        yield made


@pytest.fixture
async def pool(processes: Processes, tmp_path: Path) -> AsyncIterator[Pool]:
    async with served_pools.serving(processes, served_pools.greeting(tmp_path)) as made:
        yield made


async def test_tools_and_verifiers_run_in_vms_and_the_lease_says_so(pool: Pool) -> None:
    lease, other = await pool.launch("a", 2)
    assert (lease.driver, lease.isolation) == ("qemu-microvm", environments_pb2.ISOLATION_WEAK)

    said = await pool.turn(
        lease,
        ("1", "search_replace", EDIT),
        ("2", "run_terminal", {"command": "sh greet.sh; uname -n; touch /tmp/mine"}),
    )
    assert said == ["ok", f"hello\n{lease.lease_id}"]
    assert await pool.turn(other, ("1", "run_terminal", {"command": "sh greet.sh; ls /tmp"})) == [
        "helo"
    ]
    diff = await pool.diff(lease)
    assert [(file.path, file.content) for file in diff.written] == [("greet.sh", b"echo hello\n")]

    for handed_in, reward in ((diff, b"1"), (await pool.diff(other), None)):
        job = environments_pb2.GradeJob(
            diff=handed_in,
            files=[environments_pb2.WorkspaceFile(path="test.sh", content=VERIFIER)],
            command="sh /tests/test.sh",
            timeout_seconds=60,
            reward_path="/logs/reward.txt",
        )
        graded = await pool.grade(lease, job)
        assert (graded.reward_file if graded.HasField("reward_file") else None) == reward


async def test_a_host_holds_the_image_that_it_boots_until_it_ends(
    pool: Pool, processes: Processes, own_image: BuiltImage
) -> None:
    await pool.launch("a")
    descriptor = os.open(own_image.folder, os.O_RDONLY | os.O_DIRECTORY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    processes.stop("node")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


async def test_a_group_that_was_announced_finds_a_vm_ready(
    pool: Pool, processes: Processes
) -> None:
    group = environments_pb2.PrepareGroupRequest(
        run_id="run", group_id="group", template="python", count=2
    )
    group.workspace.uri = pool.uri
    await pool.broker.PrepareGroup(group)
    for _ in range(READY_LOOKS):
        if 'etude_env_stock{start="paused_clone"} 1.0' in processes.metrics("node"):
            break
        await asyncio.sleep(0.2)

    (lease,) = await pool.launch("a")
    assert await pool.turn(lease, ("1", "run_terminal", {"command": "uname -n"})) == [
        lease.lease_id
    ]

    assert 'etude_env_starts_total{start="paused_clone"} 1.0' in processes.metrics("node")
    async with asyncio.timeout(microvms.COMMAND_LIMIT_S):
        async for told in pool.watch.WatchPool(environments_pb2.WatchPoolRequest()):
            if told.warm_percent == 100:
                break
