"""A pool that names Firecracker, whose broker and node are processes: leases, tools, snapshots."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.environments import served_pools
from tests.support.environments.pool_client import Pool
from tests.support.environments.pool_processes import Processes

from etude.envserver.drivers.vm.firecracker.jail import FirecrackerPrograms
from etude.envserver.drivers.vm.jail import KVM
from etude.envserver.images.built_image import BuiltImage
from etude.v1 import environments_pb2

pytestmark = pytest.mark.skipif(
    not os.access(KVM, os.R_OK | os.W_OK), reason=f"a node without {KVM} takes no such pool"
)


@pytest.fixture
def processes(
    image: BuiltImage,
    programs: FirecrackerPrograms,
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Processes]:
    monkeypatch.setenv("PATH", f"{programs.jailer.parent}:{os.environ['PATH']}")
    made = Processes(tmp_path)
    made.write_pool("MicroVM", "Untrusted", driver="Firecracker", image=image.folder.as_uri())
    yield made
    assert made.environment("node")["ETUDE_SCRATCH"] == str(scratch)
    for role in made.running:
        made.stop(role)


@pytest.fixture
async def pool(processes: Processes, tmp_path: Path) -> AsyncIterator[Pool]:
    async with served_pools.serving(processes, served_pools.greeting(tmp_path)) as made:
        yield made


async def test_a_lease_says_that_its_wall_is_strong_and_its_vm_outlives_the_host(
    pool: Pool, processes: Processes
) -> None:
    (lease,) = await pool.launch("a", 1)
    assert (lease.driver, lease.isolation) == ("firecracker", environments_pb2.ISOLATION_STRONG)
    command = {"command": "sh greet.sh; uname -n; echo here > /tmp/memory"}
    assert await pool.turn(lease, ("1", "run_terminal", command)) == [f"helo\n{lease.lease_id}"]

    processes.kill("node")
    processes.start("node")
    await processes.ready("node")

    found = await pool.turn(lease, ("2", "run_terminal", {"command": "cat /tmp/memory"}))
    assert found == ["here"]
