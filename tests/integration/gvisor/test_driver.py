"""A node's sandboxes as containers of gVisor, also when the node or a container dies."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.support.environments.sandbox_states import TREE, nothing

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.drivers import process_identity, scratch_folder
from etude.envserver.drivers.base import (
    DriverUnavailableError,
    SandboxError,
    StartKind,
    Verification,
)
from etude.envserver.drivers.gvisor import checkpoints
from etude.envserver.drivers.gvisor.driver import GvisorDriver
from etude.envserver.drivers.gvisor.sandbox import GvisorSandbox
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage import folders, trees
from etude.envserver.storage.trees import File

LIMIT_S = 60


async def begun(driver: GvisorDriver, name: str) -> GvisorSandbox:
    folder = driver.leases / name
    folder.mkdir()
    found = driver.sandbox(folder, nothing, template="small")
    assert isinstance(found, GvisorSandbox)
    assert not found.is_started
    await found.initialize(TREE)
    assert found.is_started
    return found


@pytest.mark.smoke
async def test_commands_are_a_user_without_rights_a_network_or_the_hosts_files(
    driver: GvisorDriver, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("the host's")
    sandbox = await begun(driver, "a")

    async def says(command: str) -> str:
        return (await sandbox.run(command, LIMIT_S)).output.decode().strip()

    assert await says("id -u; uname -r") == "1000\n4.4.0", "a kernel of its own"
    rights = await says("grep -E 'Cap(Eff|Prm)' /proc/self/status")
    assert {line.split()[-1] for line in rights.splitlines()} == {"0000000000000000"}
    hosts = await says(f"ls -d {tmp_path}/secret {driver.scratch} 2>&1")
    assert hosts.count("No such file") == 2
    assert "eth" not in await says("cat /proc/net/dev")
    assert (
        await says("{ mount -t tmpfs x /tmp || mkdir /x; } 2>/dev/null || echo refused")
        == "refused"
    )
    # No workspace is larger than its slot.
    filling = "for n in $(seq 5); do dd if=/dev/zero of=big-$n bs=1M count=60 || exit 1; done"
    assert (await sandbox.run(filling, LIMIT_S)).exit_code != 0
    await sandbox.close()
    assert await driver._runsc.containers() == []


async def test_a_successor_goes_on_with_containers_and_ends_those_of_nobody(
    driver: GvisorDriver,
) -> None:
    kept, lost = await begun(driver, "kept"), await begun(driver, "lost")
    count = "i=0; while :; do i=$((i+1)); echo $i > count; sleep 0.2; done"
    job = await kept.workspace.jobs.start(count, timeout_s=None)
    await driver.stop()  # what was begun is not told: a node that is killed tells nobody
    folders.remove_folder(driver.leases / "lost")

    successor = GvisorDriver(scratch=driver.scratch, images=driver.images, memory_mib=256)
    try:
        await successor.start()
        assert len(await successor._runsc.containers()) == 1
        taken = successor.sandbox(driver.leases / "kept", nothing, template="small")
        assert taken.is_started
        assert taken.workspace.jobs.may_run
        assert (await taken.workspace.jobs.state(job)).is_running
        await taken.workspace.jobs.kill(job)
        content = await taken.read_files(folders.SMALL)
        assert {**TREE}.items() <= dict(content.tree).items()
        await taken.close()
    finally:
        await successor.stop()
        await driver.start()
    assert not lost.is_intact


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
async def test_a_start_that_is_cancelled_leaves_nothing(
    driver: GvisorDriver, after_s: float
) -> None:
    before = set(driver._runsc.live)
    beginning = asyncio.create_task(begun(driver, "a"))
    await asyncio.sleep(after_s)
    beginning.cancel()
    await asyncio.wait([beginning])
    if not beginning.cancelled():
        await beginning.result().close()
    assert await driver._runsc.containers() == []
    assert driver._runsc.live == before


async def test_what_no_lease_and_no_process_knows_is_swept(
    driver: GvisorDriver, tmp_path: Path
) -> None:
    leased = await begun(driver, "a")
    making = await driver._begin("small", tmp_path)
    await driver._end_orphans()
    assert len(await driver._runsc.containers()) == 2
    driver._runsc.live.clear()  # as a successor has it
    await driver._end_orphans()
    assert await driver._runsc.containers() == [leased._running.name]
    assert making.is_lost
    await leased.close()


async def test_a_container_that_dies_after_a_resume_that_was_cut_off_is_lost(
    driver: GvisorDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await begun(driver, "a")
    await sandbox.pause()
    found = driver.sandbox(driver.leases / "a", nothing, template="small")
    assert isinstance(found, GvisorSandbox)
    # As kill -9 before the last line has it.
    monkeypatch.setattr(checkpoints, "remove", lambda _: None)
    await found.resume()
    process = found._running.process
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkspaceLostError):
        await found.run("true", LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        while process_identity.identify(process.pid) == process:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.05)
    with pytest.raises(SandboxError, match="has ended"):
        driver.sandbox(driver.leases / "a", nothing, template="small")
    await found.close()


async def test_a_container_that_dies_is_a_fault_of_the_platform(driver: GvisorDriver) -> None:
    sandbox = await begun(driver, "a")
    call = asyncio.create_task(sandbox.run("touch begun; sleep 1000", 10 * LIMIT_S))
    has_begun = await sandbox.run("until [ -e begun ]; do sleep 0.1; done", LIMIT_S)
    assert has_begun.exit_code == 0
    process = sandbox._running.process
    os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(WorkspaceLostError):
            await call
        while process_identity.identify(process.pid) == process:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    assert not sandbox.is_intact
    with pytest.raises(SandboxError, match="has ended"):
        driver.sandbox(driver.leases / "a", nothing, template="small")
    await sandbox.close()


async def test_a_verifier_runs_in_a_container_where_nobody_was(driver: GvisorDriver) -> None:
    work = Verification(
        template="small",
        workspace={"answer": File(b"42")},
        tests={"test.sh": File(b"cat /workspace/answer; printf 1 > /logs/reward.txt")},
        command="sh /tests/test.sh",
        timeout_s=LIMIT_S,
        reward_path="/logs/reward.txt",
    )
    done = await driver.verify(work)
    assert (done.output, done.exit_code, done.collected) == (b"42", 0, b"1")
    assert done.sandbox_start is not None
    assert done.sandbox_start.kind is StartKind.SPAWN, "a grade is a start too"
    assert list(driver.leases.iterdir()) == []
    assert not driver.has_services("small")


async def test_a_folder_has_one_daemon(
    driver: GvisorDriver, image: BuiltImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_folder, "LOCK_LIMIT_S", 0.0)
    other = GvisorDriver(scratch=driver.scratch, images={"small": image}, memory_mib=256)
    with pytest.raises(DriverUnavailableError, match="another node daemon"):
        await other.start()


async def test_a_sandbox_keeps_its_files(driver: GvisorDriver) -> None:
    sandbox = await begun(driver, "a")
    whole = await sandbox.read_files(folders.SMALL)
    assert trees.tree_identity(whole.tree) == trees.tree_identity(TREE)
    assert whole.is_plain
    assert sandbox.sandbox_start is not None
    await sandbox.close()
