"""A VM that is preempted: its memory is as it was, once it has a slot again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from tests.support.environments import served_pools
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import START_TIMEOUT_S, Processes

from etude.envserver.images.built_image import BuiltImage
from etude.v1 import environments_pb2

SERVING = environments_pb2.LEASE_CLASS_SERVING
SLOTS = 4
WRITE = "cat /proc/sys/kernel/random/boot_id > /dev/shm/boot"
SHOW = "cmp /dev/shm/boot /proc/sys/kernel/random/boot_id && echo same"


@pytest.fixture
def processes(image: BuiltImage, tmp_path: Path) -> Iterator[Processes]:
    with served_pools.of_machines(tmp_path, image) as made:
        floor = {"name": "Serving", "floorSlots": SLOTS, "headroomSeconds": 0}
        made.lease = {"classes": [floor]}
        made.write_pool("Process", "Trusted", driver="QemuMicroVM", image=image.folder.as_uri())
        yield made


@pytest.fixture
async def pool(processes: Processes, tmp_path: Path) -> AsyncIterator[Pool]:
    async with served_pools.serving(processes, served_pools.greeting(tmp_path)) as made:
        yield made


async def test_the_memory_of_a_preempted_vm_is_as_it_was_afterwards(
    processes: Processes, pool: Pool
) -> None:
    rollouts = await pool.launch("rollouts", SLOTS)
    for lease in rollouts:
        await pool.turn(lease, ("1", "run_terminal", {"command": WRITE}))

    people = await pool.launch("people", SLOTS, lease_class=SERVING)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pool.turn(rollouts[0], ("2", "run_terminal", {"command": SHOW}))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    ids = [each.lease_id for each in people]
    await pool.broker.ReleaseLeases(environments_pb2.ReleaseLeasesRequest(lease_ids=ids))

    async with asyncio.timeout(START_TIMEOUT_S):
        waiting = list(rollouts)
        while waiting:
            with contextlib.suppress(grpc.aio.AioRpcError):
                show = ("2", "run_terminal", {"command": SHOW})
                assert await pool.turn(waiting[-1], show) == ["same"]
                waiting.pop()
