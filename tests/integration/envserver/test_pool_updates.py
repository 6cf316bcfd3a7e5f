"""A pool's newer spec on its way from the operator to a host with a lease, in processes."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.environments.pool_processes import START_TIMEOUT_S, Processes

from etude.v1 import environments_pb2

Driver = Any  # the fixture only proves that this machine allows namespaces


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


async def until_report(pool: Any, holds: Callable[[Any], bool]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        async for report in pool.watch.WatchPool(environments_pb2.WatchPoolRequest()):
            if holds(report):
                return


async def test_a_host_without_a_file_drains_and_starts_again_with_the_newer_spec(
    processes: Processes, connect: Callable[..., Any], source: str, driver: Driver
) -> None:
    whole = json.loads(processes.pool_file.read_text())
    processes.start("broker")
    await processes.ready("broker")
    processes.start("node", {"ETUDE_POOL_FILE": ""})
    await processes.ready("node")
    pool = connect(f"127.0.0.1:{processes.ports['broker']}", source)
    await until_report(pool, lambda report: report.slots == 4)
    (lease,) = await pool.launch("before")

    whole["spec"]["slotsPerReplica"] = 6
    request = environments_pb2.UpdatePoolRequest(pool_json=json.dumps(whole))
    told = await pool.watch.UpdatePool(request, timeout=START_TIMEOUT_S)

    # A draining host offers no slot, and its lease goes on.
    await until_report(pool, lambda report: not report.nodes)
    assert await pool.turn(lease, ("1", "run_terminal", {"command": "echo on"})) == ["on"]
    release = environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
    await pool.broker.ReleaseLeases(release, timeout=START_TIMEOUT_S)
    await until_report(pool, lambda report: report.slots == 6)
    assert processes.running["node"].poll() is None
    async for report in pool.watch.WatchPool(environments_pb2.WatchPoolRequest()):
        assert report.pool_revision == told.revision
        break
    assert await pool.launch("after")


async def test_a_host_that_can_start_nothing_says_why(
    processes: Processes, connect: Callable[..., Any], source: str
) -> None:
    processes.write_pool("MicroVM", "Untrusted", driver="Firecracker", image="absent")
    processes.start("broker")
    await processes.ready("broker")
    processes.start("node", {"ETUDE_POOL_FILE": ""})
    pool = connect(f"127.0.0.1:{processes.ports['broker']}", source)

    problems = dict[str, str]()

    def found(report: environments_pb2.WatchPoolResponse) -> bool:
        problems.update({each.node_id: each.message for each in report.problems})
        return bool(problems)

    await until_report(pool, found)
    assert "there is no image 'absent'" in problems["demo-repos-node-0"]
    assert processes.running["node"].poll() is None
