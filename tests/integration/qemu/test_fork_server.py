"""Machines that are split off from one that ran before."""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.vm.microvms import Guest, Lab
from tests.support.vm.random_program import random_command

from etude.envserver.drivers.vm import guest_vm, vmm_processes
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.guest_vm import GuestVm as Machine
from etude.envserver.drivers.vm.jail import NOBODY, Jail
from etude.envserver.drivers.vm.qemu.fork_server import (
    child_processes,
    fork_server,
    preload_library,
)
from etude.envserver.drivers.vm.qemu.fork_server.fork_server import ForkServer
from etude.envserver.drivers.vm.qemu.fork_server.supervisor import ForkServerSupervisor
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.vmm_processes import VmFolders

_DENIED = 3
"""Filters of a part: its stem's, QEMU's, and the one that takes its stem's last right from it."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    found = preload_library.preload_library(tmp_path_factory.mktemp("library"))
    assert found is not None
    return found


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (each.partition(":") for each in lines)}


def files_of(pid: int) -> list[str]:
    return [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]


@asynccontextmanager
async def grown(lab: Lab, library: Path) -> AsyncIterator[ForkServer]:
    made = await fork_server.start_fork_server(
        lab.template, library, folder=lab.new_folder(), jail=Jail()
    )
    try:
        yield made
    finally:
        await made.destroy()


@asynccontextmanager
async def part(lab: Lab, of: ForkServer) -> AsyncIterator[Guest]:
    vm = await of.spawn(lab.new_folder())
    try:
        found: Machine = await guest_vm.start_child(vm, name=f"part-{vm.pid}")
        yield Guest(vm, found.channel)
        await found.channel.close()
    finally:
        await vm.destroy()


async def test_parts_of_a_fork_server_are_vms_of_their_own(lab: Lab, library: Path) -> None:
    async with grown(lab, library) as one, part(lab, one) as a, part(lab, one) as b:
        await a.sh("echo a > /tmp/name; (sleep 600 &) >/dev/null 2>&1")
        assert await b.sh("ls /tmp/name 2>/dev/null || echo none; pidof sleep || echo idle") == (
            "none\nidle"
        )
        assert await a.sh("cat /tmp/name; hostname") == f"a\npart-{a.vm.pid}"
        assert await a.sh("cat /etc/machine-id") != await b.sh("cat /etc/machine-id")
        random = "head -c 16 /dev/urandom | od -An -tx1"
        assert await a.sh(random) != await b.sh(random)
        numbers = [(await each.sh(random_command())).split() for each in (a, b)]
        assert len({each for pair in numbers for each in pair}) == 4
        async with part(lab, one) as c:
            assert await c.sh("ls /tmp/name 2>/dev/null || echo none") == "none"
            assert await c.sh("ls -A /workspace") == ""


async def test_parts_write_to_disks_of_their_own(lab: Lab, library: Path) -> None:
    make = "dd if=/dev/urandom of=/var/noise bs=1M count=8 2>/dev/null; sync; md5sum < /var/noise"
    async with grown(lab, library) as one, part(lab, one) as a, part(lab, one) as b:
        made = [await each.sh(make) for each in (a, b)]
        assert made[0] != made[1]
        look = "echo 3 > /proc/sys/vm/drop_caches; md5sum < /var/noise"
        assert [await each.sh(look) for each in (a, b)] == made
        async with part(lab, one) as c:
            assert await c.sh("ls /var/noise 2>/dev/null || echo none") == "none"


async def test_a_part_outlives_its_fork_server_and_can_be_saved(lab: Lab, library: Path) -> None:
    async with grown(lab, library) as one:
        whole = part(lab, one)
        found = await whole.__aenter__()
    assert one.vm.exited.done()
    await found.sh("echo kept > /tmp/name; dd if=/dev/urandom of=/tmp/noise bs=1M count=2")
    wanted = await found.sh("md5sum < /tmp/noise; cat /tmp/name")
    saved = await lab.save(found)
    again = await lab.guest(saved)
    assert await again.sh("md5sum < /tmp/noise; cat /tmp/name") == wanted
    assert await found.sh("md5sum < /tmp/noise; cat /tmp/name") == wanted
    saved.close()
    await whole.__aexit__(None, None, None)


async def test_a_part_has_the_jail_of_every_monitor(lab: Lab, library: Path) -> None:
    async with grown(lab, library) as one, part(lab, one) as found:
        seen = status(found.vm.pid)
        assert seen["Uid"].split() == [str(NOBODY)] * 4
        assert int(seen["CapEff"], 16) == 0
        assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
        assert int(seen["Seccomp_filters"]) == _DENIED
        assert int(seen["PPid"]) == os.getpid()
        # No socket of another's: two that listen, and the two connections of this test.
        assert sum(name.startswith("socket:") for name in files_of(found.vm.pid)) == 4


async def test_a_part_is_found_by_its_own_folder(lab: Lab, library: Path) -> None:
    async with grown(lab, library) as one, part(lab, one) as found:
        seen = {
            each.pid: folder
            for each, folder in vmm_processes.find_marked_processes(lab.folder).items()
        }
        assert seen[found.vm.pid] == found.vm.folder
        assert seen[one.vm.pid] == one.vm.folder
        assert VmFolders(scratch=lab.folder).folders() == []


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0)


def children_of(one: ForkServer) -> set[int]:
    found = set()
    for each in vmm_processes.find_marked_processes(one.vm.folder.parent):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(each.pid) == one.vm.pid:
                found.add(each.pid)
    return found - {one.vm.pid}


async def test_a_split_that_is_cancelled_leaves_no_child_and_no_answer(
    lab: Lab, library: Path
) -> None:
    async with grown(lab, library) as one:
        for num_cancelled in (1, 2):
            splitting = asyncio.create_task(one.spawn(lab.new_folder()))
            for _ in range(num_cancelled):
                await asyncio.sleep(0)
                splitting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await splitting
        async with part(lab, one) as found:
            seen = {
                each.pid: folder
                for each, folder in vmm_processes.find_marked_processes(lab.folder).items()
            }
            assert seen[found.vm.pid] == found.vm.folder
            # Who was cancelled twice did not wait; the turn of the split after it did.
            await eventually(lambda: children_of(one) == {found.vm.pid})


async def test_a_fork_server_whose_answer_is_not_waited_for_is_ended_with_its_child(
    lab: Lab, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = ForkServer._fork
    async with grown(lab, library) as one, part(lab, one) as before:
        is_there = asyncio.Event()

        async def unheard(stem: ForkServer, folder: Path) -> int:
            await forked(stem, folder)
            is_there.set()
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")

        monkeypatch.setattr(ForkServer, "_fork", unheard)
        splitting = asyncio.create_task(one._spawn(lab.new_folder()))
        await is_there.wait()
        assert len(children_of(one)) == 2
        splitting.cancel()  # the order itself, as the end of the loop does
        with pytest.raises(asyncio.CancelledError):
            await splitting
        assert not one.is_alive
        assert one.vm.exited.done()
        assert children_of(one) == {before.vm.pid}
        with pytest.raises(VmmError, match="not forked"):
            await one.spawn(lab.new_folder())
        assert await before.sh("echo alive") == "alive"


async def test_an_answer_with_another_vms_number_ends_the_fork_server_and_not_that_vm(
    lab: Lab, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_processes, "_NAMED_LIMIT_S", 0.2)
    async with grown(lab, library) as one, part(lab, one) as a, part(lab, one) as b:

        async def shifted(_stem: ForkServer, _folder: Path) -> int:
            return a.vm.pid

        monkeypatch.setattr(ForkServer, "_fork", shifted)
        with pytest.raises(VmmError, match="is not that of"):
            await one.spawn(lab.new_folder())
        assert not one.is_alive
        assert await a.sh("echo a") + await b.sh("echo b") == "ab"


async def test_a_library_that_the_loader_ignores_makes_no_fork_server(
    lab: Lab, tmp_path: Path
) -> None:
    broken = tmp_path / "stem.so"
    broken.write_bytes(b"no library")
    broken.chmod(0o644)
    folder = lab.new_folder()
    with pytest.raises(VmmError, match="has not loaded"):
        await fork_server.start_fork_server(lab.template, broken, folder=folder, jail=Jail())
    assert not vmm_processes.find_marked_processes(lab.folder)


async def test_a_fork_server_without_its_host_ends(lab: Lab, library: Path) -> None:
    async with grown(lab, library) as one:
        one._control.close()  # what the kernel does when the node is killed
        await asyncio.wait_for(asyncio.shield(one.vm.exited), 30)
        with pytest.raises(VmmError, match="not forked"):
            await one.spawn(lab.new_folder())


async def test_where_no_library_can_be_built_nothing_is_split_off(lab: Lab) -> None:
    keeper = ForkServerSupervisor(
        lab.template,
        library=lambda: None,
        folder=lab.folder / "stem",
        jail=Jail(),
        scheduler=StartScheduler(cores=1, room=8),
    )
    keeper.ensure_started()
    await asyncio.sleep(0)
    assert await keeper.spawn(lab.new_folder()) is None
    assert not keeper.is_ready
    await keeper.close()


async def test_a_keeper_whose_library_fails_tries_again_later(lab: Lab) -> None:
    def failing() -> Path:
        raise VmmError("the compiler hangs")

    keeper = ForkServerSupervisor(
        lab.template,
        library=failing,
        folder=lab.folder / "stem",
        jail=Jail(),
        scheduler=StartScheduler(cores=1, room=8),
    )
    growing = keeper.ensure_started()
    assert growing is not None
    await growing
    assert keeper.ensure_started() is None
    await keeper.close()


async def test_a_keeper_grows_another_fork_server_when_one_has_ended(
    lab: Lab, library: Path
) -> None:
    lanes = StartScheduler(cores=1, room=8)
    keeper = ForkServerSupervisor(
        lab.template,
        library=lambda: library,
        folder=lab.folder / "stem",
        jail=Jail(),
        scheduler=lanes,
    )
    try:
        for _ in range(2):
            keeper.ensure_started()
            assert keeper._starting is not None
            await keeper._starting
            vm = await keeper.spawn(lab.new_folder())
            assert vm is not None
            await vm.destroy()
            assert keeper._server is not None
            await keeper._server.vm.kill()
            assert await keeper.spawn(lab.new_folder()) is None
    finally:
        await keeper.close()


async def test_a_host_with_many_open_files_grows_a_fork_server_like_any_other(
    lab: Lab, library: Path
) -> None:
    # A monitor inherits files under the numbers that they have with its node.
    with contextlib.ExitStack() as open_files:
        for _ in range(300):
            open_files.enter_context(socket.socket())
        async with grown(lab, library) as one, part(lab, one) as a:
            assert await a.sh("echo ran") == "ran"
