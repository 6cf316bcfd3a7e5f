"""A node's sandboxes as microVMs: what the process driver does, inside a machine of its own."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.vm import microvms

from etude.agent.workspace import ExecResult, WorkspaceLostError
from etude.envserver.drivers.base import IsolationStrength, Sandbox, SandboxError, Verification
from etude.envserver.drivers.vm import sealed_files, uid_pool
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.start.quarantine import QuarantinedError, StartQuarantine
from etude.envserver.drivers.vm.vmm_processes import VM_FOLDER, load_records
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage import folders, trees
from etude.envserver.storage.trees import File

LONG_S = 600.0
"""A call that waited for its own end would run into the test's."""
TREE = {
    "README": File(b"read me\n"),
    "run.sh": File(b"#!/bin/sh\necho ran\n", executable=True),
    "deep/er/notes.txt": File(b"one\ntwo\n"),
}


async def nothing(command: str, timeout_s: float) -> ExecResult:
    raise AssertionError((command, timeout_s))


@pytest.fixture(scope="session")
def started(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QemuDriver]:
    """A driver belongs to no event loop, and to boot its template takes seconds. Stems do."""
    scratch = tmp_path_factory.mktemp("driver")
    made = QemuDriver(scratch=scratch, images={"small": image}, machine=microvms.small_machine())
    asyncio.run(made.start())
    for address, starter in made._starters.items():
        made._starters[address] = replace(starter, spawner=None)
    yield made
    asyncio.run(made.stop())


@pytest.fixture
def driver(started: QemuDriver) -> Iterator[QemuDriver]:
    yield started
    for folder in started.leases.iterdir():
        folders.remove_folder(folder)


async def begun(driver: QemuDriver, name: str) -> Sandbox:
    folder = driver.leases / name
    folder.mkdir()
    found = driver.sandbox(folder, nothing, template="small")
    assert not found.is_started
    await found.initialize(TREE)
    assert found.is_started
    return found


@pytest.mark.skipif(not uid_pool.are_mapped(), reason="users of VMs need root")
async def test_two_vms_have_two_users(driver: QemuDriver) -> None:
    for name in ("a", "b"):
        await begun(driver, name)
    noted = load_records(driver.vm_folders())
    found = {noted[driver.leases / name / VM_FOLDER].uid for name in ("a", "b")}
    assert len(found) == 2
    assert found <= set(uid_pool.UIDS)


@pytest.mark.smoke
async def test_a_sandbox_holds_the_first_files_and_what_commands_make_of_them(
    driver: QemuDriver,
) -> None:
    sandbox = await begun(driver, "a")
    whole = await sandbox.read_files(folders.SMALL)
    assert trees.tree_identity(whole.tree) == trees.tree_identity(TREE)
    assert whole.is_plain
    assert await sandbox.workspace.read("deep/er/notes.txt") == b"one\ntwo\n"
    done = await sandbox.run("./run.sh && id -u && echo three >> deep/er/notes.txt", 60)
    assert (done.output, done.exit_code) == (b"ran\n1000\n", 0)
    after = await sandbox.read_files(folders.DIFF)
    diff = trees.tree_difference(TREE, after.tree)
    assert [file.path for file in diff.written] == ["deep/er/notes.txt"]
    await sandbox.close()


async def test_sandboxes_see_nothing_of_each_other_and_end_with_their_lease(
    driver: QemuDriver,
) -> None:
    one, other = await begun(driver, "a"), await begun(driver, "b")
    await one.run("echo canary > /tmp/canary; echo canary > canary", 60)
    assert (await other.run("cat /tmp/canary canary", 60)).exit_code == 1
    machine = one._running.vm._guest.vm.exited  # type: ignore[attr-defined]
    await one.close()
    assert machine.done()
    with pytest.raises(SandboxError, match="has ended"):
        await one.run("true", 60)
    assert (await other.run("true", 60)).exit_code == 0
    await other.close()


async def test_a_vm_that_dies_is_a_fault_of_the_platform(driver: QemuDriver) -> None:
    sandbox = await begun(driver, "a")
    assert (await sandbox.run("kill -9 1; echo o > /proc/sysrq-trigger; reboot -f", 60)).exit_code
    await sandbox._running.vm._guest.vm.destroy()  # type: ignore[attr-defined]
    with pytest.raises(WorkspaceLostError):
        await sandbox.run("true", 5)
    await sandbox.close()


@pytest.mark.parametrize("death", ["killed", "panic"])
async def test_a_call_ends_at_once_when_its_vm_dies(driver: QemuDriver, death: str) -> None:
    sandbox = await begun(driver, "a")
    assert sandbox.is_intact
    call = asyncio.create_task(sandbox.run("sleep 1000", LONG_S))
    guest = sandbox._running  # type: ignore[attr-defined]
    if death == "killed":
        os.kill(guest.vm._guest.vm.pid, signal.SIGKILL)
    else:
        root = GuestCommands(channel=guest, uid=0)
        with pytest.raises(WorkspaceLostError):
            await root.run("echo c > /proc/sysrq-trigger", LONG_S)
    async with asyncio.timeout(LONG_S / 10):
        with pytest.raises(WorkspaceLostError):
            await call
    assert not sandbox.is_intact
    await sandbox.close()


async def test_a_vm_that_dies_while_nobody_calls_it_is_lost(driver: QemuDriver) -> None:
    sandbox = await begun(driver, "a")
    vm = sandbox._running.vm._guest.vm  # type: ignore[attr-defined]
    os.kill(vm.pid, signal.SIGKILL)
    await asyncio.wait([vm.exited])
    assert not sandbox.is_intact
    with pytest.raises(WorkspaceLostError):
        await sandbox.run("true", LONG_S)
    await sandbox.close()


async def test_a_template_that_only_crashes_is_refused_with_its_last_words(
    driver: QemuDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "quarantine", StartQuarantine(threshold=2))
    ((address, starter),) = driver._starters.items()
    junk = sealed_files.create_sealed("devices", [b"no state of any machine"])
    assert isinstance(starter.template, QemuTemplate)
    broken = replace(starter, template=replace(starter.template, devices=junk))
    monkeypatch.setitem(driver._starters, address, broken)
    for name in ("a", "b"):
        driver.check_startable("small")
        with pytest.raises(VmmError, match="load of migration failed"):
            await begun(driver, name)
    with pytest.raises(QuarantinedError, match="load of migration failed"):
        driver.check_startable("small")
    with pytest.raises(QuarantinedError):
        await begun(driver, "c")
    os.close(junk)


async def test_a_verifier_runs_in_a_vm_where_nobody_was(driver: QemuDriver) -> None:
    work = Verification(
        template="small",
        workspace={"answer": File(b"42")},
        tests={"test.sh": File(b"cat /workspace/answer; printf 1 > /logs/reward.txt")},
        command="sh /tests/test.sh",
        timeout_s=60,
        reward_path="/logs/reward.txt",
    )
    done = await driver.verify(work)
    assert (done.output, done.exit_code, done.collected) == (b"42", 0, b"1")
    assert list(driver.leases.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [
        b"true",
        b"mkdir /logs/reward.txt",
        b"ln -s /etc/passwd /logs/reward.txt",
        b"mkfifo /logs/reward.txt",
        b"head -c 100000 /dev/zero > /logs/reward.txt",
    ],
    ids=["none", "folder", "link", "pipe", "large"],
)
async def test_what_is_no_small_file_is_no_reward(driver: QemuDriver, script: bytes) -> None:
    work = Verification(
        template="small",
        workspace={},
        tests={"test.sh": File(script)},
        command="sh /tests/test.sh",
        timeout_s=60,
        reward_path="/logs/reward.txt",
    )
    assert (await driver.verify(work)).collected is None


def test_translated_vms_do_not_claim_a_strong_wall(image: BuiltImage, tmp_path: Path) -> None:
    made = QemuDriver(scratch=tmp_path, images={"small": image}, machine=microvms.small_machine())
    assert made.strength is IsolationStrength.WEAK


async def test_a_template_that_was_not_booted_is_said_by_name(driver: QemuDriver) -> None:
    folder = driver.leases / "a"
    folder.mkdir()
    with pytest.raises(SandboxError, match="'other'"):
        await driver.sandbox(folder, nothing, template="other").initialize(TREE)
