"""A node of Firecracker's machines is killed, and the one after it goes on with them."""

import asyncio
from pathlib import Path

import pytest
from tests.support.environments.killed_hosts import WRITE, die, killed, looked, order, sh
from tests.support.environments.sandbox_states import LIMITS, nothing
from tests.support.vm.firecracker.install import Make

from etude.envserver.drivers.vm.firecracker import template
from etude.envserver.drivers.vm.firecracker.driver import FirecrackerDriver
from etude.envserver.drivers.vm.firecracker.vmm_processes import FirecrackerFolders
from etude.envserver.host.host import Host
from etude.envserver.host.workspace_sources import WorkspaceSources


def node_of(driver: FirecrackerDriver) -> Host:
    return Host(
        driver=driver, sources=WorkspaceSources(driver.scratch), slots=8, templates={"python"}
    )


async def work_and_die(driver: FirecrackerDriver, when: str) -> None:
    node = node_of(driver)
    await node.driver.start()
    await node.take_over()
    await node.open(order(driver.scratch, "a"))
    await sh(node, "a", "1", WRITE.format("one", "one"))
    if when == "before a diff is put together":
        # From here on the pages of "one" are in no later diff.
        template._merge_diffs = die  # type: ignore[assignment]
        await node.states.snapshot(node.find("a"), "s", with_memory=True)
    die()


async def succeed(driver: FirecrackerDriver) -> None:
    node = node_of(driver)
    await node.driver.start()
    try:
        assert await node.take_over() == (1, 0)
        assert await looked(node, "a", "2") == "one one"
        await node.states.snapshot(node.find("a"), "t", with_memory=True)
        await sh(node, "a", "3", WRITE.format("two", "two"))
        await node.open(order(driver.scratch, "fork", snapshot_id="t"))
        assert await looked(node, "fork", "1") == "one one"
        await node.states.rollback(node.find("a"), "t")
        assert await looked(node, "a", "4") == "one one"
        await node.close(["a", "fork"])
    finally:
        await node.driver.stop()


@pytest.mark.parametrize(
    "when",
    [pytest.param("between calls", marks=pytest.mark.long), "before a diff is put together"],
)
def test_vms_and_all_of_their_memory_outlive_the_host(
    make: Make, scratch: Path, tmp_path: Path, when: str
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "README").write_text("read me\n")
    killed(lambda: work_and_die(make(scratch), when))
    assert len(FirecrackerFolders(scratch=scratch).find_processes()) == 1
    asyncio.run(succeed(make(scratch)))
    assert FirecrackerFolders(scratch=scratch).find_processes() == {}


def test_what_nobody_wrote_down_is_ended_at_the_next_start(make: Make, scratch: Path) -> None:
    async def begin_and_die() -> None:
        driver = make(scratch)
        await driver.start()
        for name in ("kept", "lost"):
            (driver.leases / name).mkdir()
            sandbox = driver.sandbox(driver.leases / name, nothing, template="python")
            await sandbox.initialize({})
        (driver.leases / "lost" / "machine" / "vm.json").unlink()
        die()

    async def go_on() -> None:
        driver = make(scratch)
        await driver.start()
        try:
            assert len(FirecrackerFolders(scratch=scratch).find_processes()) == 1
            assert not (driver.leases / "lost" / "machine").exists()
            found = driver.sandbox(driver.leases / "kept", nothing, template="python")
            assert found.is_started
            (scratch / "saved").mkdir()
            assert (await found.save(scratch / "saved", LIMITS)).num_bytes > 0
            await found.close()
        finally:
            await driver.stop()

    killed(begin_and_die)
    assert len(FirecrackerFolders(scratch=scratch).find_processes()) == 2
    asyncio.run(go_on())
