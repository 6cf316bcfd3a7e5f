"""How machines of Firecracker are kept apart: from the node, each other, and the template."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.environments.sandbox_states import States
from tests.support.vm.firecracker.install import Make

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.drivers.base import (
    DriverUnavailableError,
    Sandbox,
    SandboxError,
    StartKind,
    TemplateReadiness,
)
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.firecracker import api_requests, jail
from etude.envserver.drivers.vm.firecracker.driver import FirecrackerDriver
from etude.envserver.drivers.vm.firecracker.vm import FirecrackerVm
from etude.envserver.drivers.vm.firecracker.vmm_processes import FirecrackerFolders

LIMIT_S = 60


@pytest.fixture
async def driver(make: Make, scratch: Path) -> AsyncIterator[FirecrackerDriver]:
    made = make(scratch)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def states(driver: FirecrackerDriver, tmp_path: Path) -> AsyncIterator[States]:
    made = States(driver, "python", tmp_path)
    yield made
    await made.close()


def monitor(sandbox: Sandbox) -> FirecrackerVm:
    found = sandbox._running.vm._guest.vm  # type: ignore[attr-defined]
    assert isinstance(found, FirecrackerVm)
    return found


def owner(pid: int) -> tuple[int, int]:
    """The real user and group of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.split(":")[0]: line.split()[1:] for line in lines}
    return int(fields["Uid"][0]), int(fields["Gid"][0])


def network(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


async def test_each_vm_is_a_user_of_its_own_without_a_network(states: States) -> None:
    one, other = monitor(await states.begun("one")), monitor(await states.begun("other"))
    assert owner(one.pid) != owner(other.pid)
    assert 0 not in (*owner(one.pid), *owner(other.pid))
    assert network(one.pid) == network(other.pid) != network("self")
    root = one.jail.root.stat()
    assert (root.st_uid, root.st_gid) == owner(one.pid)
    assert one.folder.stat().st_mode & 0o077 == 0


async def test_what_vms_share_none_of_them_can_change(states: States) -> None:
    vm = monitor(await states.begun("one"))
    for name in (api_requests.MEMORY, api_requests.STATE, api_requests.ROOT):
        found = (vm.jail.root / name).stat()
        assert (found.st_uid, found.st_mode & 0o777) == (0, 0o444)
    await vm.freeze()
    with pytest.raises(VmmError, match="Permission denied"):
        await vm.api.put(*api_requests.create("Full", state="saved", memory=api_requests.MEMORY))


async def test_a_name_in_the_jail_that_leads_out_of_it_is_not_followed(states: States) -> None:
    vm = monitor(await states.begun("one"))
    for name, target in {"file": "/etc/passwd", "socket": str(vm.jail.root / jail.API)}.items():
        (vm.jail.root / name).symlink_to(target)
    with pytest.raises(VmmError):
        jail.open_file(vm.jail, "file")
    with pytest.raises(VmmError):
        jail.dial(vm.jail, "socket")
    with pytest.raises(VmmError, match="size"):
        jail.open_file(vm.jail, api_requests.MEMORY, size_bytes=1)


async def test_a_vm_that_dies_is_a_fault_of_the_platform(states: States) -> None:
    sandbox = await states.begun("one")
    vm = monitor(sandbox)
    os.kill(vm.pid, signal.SIGKILL)
    await vm.exited
    assert not sandbox.is_intact
    with pytest.raises((WorkspaceLostError, SandboxError)):
        await sandbox.run("true", LIMIT_S)


async def test_what_ended_leaves_no_process_no_folder_and_no_user(
    driver: FirecrackerDriver, states: States
) -> None:
    for name in ("one", "other"):
        sandbox = await states.begun(name)
        vm = monitor(sandbox)
        assert len(FirecrackerFolders(scratch=driver.scratch).find_processes()) == 1
        await sandbox.close()
        assert not vm.folder.exists()
    assert FirecrackerFolders(scratch=driver.scratch).find_processes() == {}
    assert not driver.uids._taken


async def test_a_jailer_that_fails_is_heard(make: Make, tmp_path: Path) -> None:
    driver = make(tmp_path)
    # The original takes such a name for a mistake.
    programs = driver.programs
    other = programs.firecracker.with_name("monitor")
    other.write_text(programs.firecracker.read_text())
    other.chmod(0o755)
    driver.programs = jail.FirecrackerPrograms(firecracker=other, jailer=programs.jailer)
    with pytest.raises(DriverUnavailableError, match="must include firecracker"):
        await driver.start()
    await driver.stop()


def stock(driver: FirecrackerDriver) -> tuple[int, int]:
    (found,) = driver.readiness().templates
    return found.paused_clones, found.shells


async def test_vms_that_are_ready_become_leases(driver: FirecrackerDriver, states: States) -> None:
    driver.keep_warm(
        [TemplateReadiness(template="python", paused_clones=1, shells=1)], max_shells=1
    )
    async with asyncio.timeout(10 * LIMIT_S):
        while stock(driver) != (1, 1):  # noqa: ASYNC110 - there is no event for tests alone
            await asyncio.sleep(0.05)
    starts = []
    for name in ("one", "other"):
        sandbox = await states.begun(name)
        assert sandbox.sandbox_start is not None
        starts.append(sandbox.sandbox_start.kind)
        assert (await sandbox.run("hostname", LIMIT_S)).output == f"{name}\n".encode()
        assert monitor(sandbox).folder == driver.leases / name / "machine"
    assert starts[0] is StartKind.PAUSED_CLONE


async def test_who_is_cancelled_while_a_vm_starts_leaves_no_process(
    driver: FirecrackerDriver, tmp_path: Path
) -> None:
    (starter,) = driver._starters.values()
    for delay_s in (0.0, 0.02, 0.3):
        folder = tmp_path / f"cancelled-{delay_s}"
        folder.mkdir()
        task = asyncio.create_task(starter.template.spawn(folder, driver.jail))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().destroy()
    assert FirecrackerFolders(scratch=driver.scratch).find_processes() == {}
    assert not driver.uids._taken
