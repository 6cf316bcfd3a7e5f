"""Machines kept ahead of demand, and starts from the warmest one there is."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.vm import microvms

from etude.agent.workspace import WorkspaceLostError
from etude.envserver.drivers.base import StartKind
from etude.envserver.drivers.vm.guest_vm import GuestVm
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.qemu.vm import QemuVm
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.start.starter import StartedVm, VmStarter
from etude.envserver.drivers.vm.start.warm_pool import WarmPool
from etude.envserver.drivers.vm.start.warm_pool_levels import WarmPoolLevel, WarmPoolTarget

NONE = WarmPoolLevel(paused=0, shells=0)


def starter(base: QemuTemplate, folder: Path, *, room: int = 100) -> VmStarter:
    lanes = StartScheduler(cores=2, room=room)
    stock = WarmPool(base, folder=folder / "stock", jail=Jail(), scheduler=lanes)
    return VmStarter(template=base, jail=Jail(), scheduler=lanes, warm_pool=stock)


@pytest.fixture
async def made(template: QemuTemplate, tmp_path: Path) -> AsyncIterator[VmStarter]:
    found = starter(template, tmp_path)
    yield found
    await found.warm_pool.close()


async def holds(made: VmStarter, held: WarmPoolLevel) -> None:
    async with asyncio.timeout(microvms.COMMAND_LIMIT_S):
        while made.warm_pool.level != held:  # noqa: ASYNC110 - there is no event for tests alone
            await asyncio.sleep(0.01)


async def begun(made: VmStarter, folder: Path, name: str) -> StartedVm:
    home = folder / name
    home.mkdir(mode=0o700)
    found = await made.start(name, home)
    assert found.guest.vm.folder == home
    assert (home / "qmp").exists()
    return found


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def words(guest: GuestVm, command: str) -> str:
    assert isinstance(guest.vm, QemuVm)
    return await microvms.Guest(guest.vm, guest.channel).sh(command)


@pytest.mark.parametrize(
    ("target", "start"),
    [
        (WarmPoolTarget(paused=1, shells=1, max_shells=1), StartKind.PAUSED_CLONE),
        (WarmPoolTarget(shells=1, max_shells=1), StartKind.SHELL),
        (WarmPoolTarget(), StartKind.SPAWN),
    ],
    ids=["paused", "shell", "none"],
)
async def test_a_start_takes_the_warmest_vm_and_says_which(
    made: VmStarter, tmp_path: Path, target: WarmPoolTarget, start: StartKind
) -> None:
    made.warm_pool.set_target(target)
    await holds(made, WarmPoolLevel(paused=target.paused, shells=target.shells))
    found = await begun(made, tmp_path, "mine")
    assert found.kind is start
    assert await words(found.guest, "hostname; wc -c < /etc/machine-id") == "mine\n33"
    await found.guest.destroy()
    assert not (tmp_path / "mine").exists()


async def test_a_paused_clone_refuses_every_call_until_it_is_somebodys(made: VmStarter) -> None:
    made.warm_pool.set_target(WarmPoolTarget(paused=1))
    await holds(made, WarmPoolLevel(paused=1, shells=0))
    waiting = made.warm_pool.take()
    assert isinstance(waiting, GuestVm)
    await waiting.vm.thaw()
    with pytest.raises(WorkspaceLostError):
        await words(waiting, "true")
    await waiting.destroy()


async def test_two_paused_clones_become_two_vms(made: VmStarter, tmp_path: Path) -> None:
    made.warm_pool.set_target(WarmPoolTarget(paused=2))
    await holds(made, WarmPoolLevel(paused=2, shells=0))
    names = ("one", "other")
    found = [await begun(made, tmp_path, name) for name in names]
    random = "head -c 16 /dev/urandom | md5sum; cat /etc/machine-id"
    said = [await words(each.guest, random) for each in found]
    assert len({line for text in said for line in text.splitlines()}) == 4
    for each in found:
        await each.guest.destroy()


async def test_what_was_taken_is_made_again_and_a_lower_target_gives_it_back(
    made: VmStarter, tmp_path: Path
) -> None:
    target = WarmPoolTarget(paused=1, shells=1, max_shells=1)
    made.warm_pool.set_target(target)
    await holds(made, WarmPoolLevel(paused=1, shells=1))
    found = await begun(made, tmp_path, "mine")
    await holds(made, WarmPoolLevel(paused=1, shells=1))
    await found.guest.destroy()
    made.warm_pool.set_target(WarmPoolTarget())
    await holds(made, NONE)
    await made.warm_pool.close()
    assert not any((tmp_path / "stock").iterdir())


async def test_shells_are_kept_once_saved_states_were_taken_up(made: VmStarter) -> None:
    made.warm_pool.set_target(WarmPoolTarget(max_shells=4))
    assert made.warm_pool.take() is None
    assert made.warm_pool.level == NONE
    assert made.warm_pool.take(only_shell=True) is None
    await holds(made, WarmPoolLevel(paused=0, shells=2))


async def test_a_vm_that_died_in_stock_is_passed_over(made: VmStarter, tmp_path: Path) -> None:
    made.warm_pool.set_target(WarmPoolTarget(paused=1))
    await holds(made, WarmPoolLevel(paused=1, shells=0))
    dead = made.warm_pool._paused[0].vm
    made.warm_pool.set_target(WarmPoolTarget(paused=1))
    os.kill(dead.pid, signal.SIGKILL)
    await dead.exited
    found = await begun(made, tmp_path, "mine")
    assert found.kind is StartKind.SPAWN
    await found.guest.destroy()


async def test_a_paused_clone_that_fails_is_replaced_by_a_colder_start(
    made: VmStarter, tmp_path: Path
) -> None:
    made.warm_pool.set_target(WarmPoolTarget(paused=1))
    await holds(made, WarmPoolLevel(paused=1, shells=0))
    # It breaks where nobody can see it before it is told to run.
    vm = made.warm_pool._paused[0].vm
    assert isinstance(vm, QemuVm)
    await vm.qmp.close()
    found = await begun(made, tmp_path, "mine")
    assert found.kind is StartKind.SPAWN
    assert await words(found.guest, "hostname") == "mine"
    await found.guest.destroy()


async def test_a_stock_that_cannot_be_filled_says_why_and_lets_starts_go_on(
    made: VmStarter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "stock").write_text("in the way")
    made.warm_pool.set_target(WarmPoolTarget(paused=1))
    with caplog.at_level(logging.WARNING):
        async with asyncio.timeout(microvms.COMMAND_LIMIT_S):
            while not made.warm_pool.refill_error:  # noqa: ASYNC110 - there is no event for tests alone
                await asyncio.sleep(0.01)
    assert "warm pool is not refilled" in caplog.text
    found = await begun(made, tmp_path, "mine")
    assert found.kind is StartKind.SPAWN
    await found.guest.destroy()
    (tmp_path / "stock").unlink()
    await holds(made, WarmPoolLevel(paused=1, shells=0))
    assert made.warm_pool.refill_error == ""


async def test_a_host_without_room_gives_up_its_stock_for_who_waits(
    template: QemuTemplate, tmp_path: Path
) -> None:
    made = starter(template, tmp_path, room=2)
    made.warm_pool.set_target(WarmPoolTarget(paused=1, shells=1, max_shells=1))
    await holds(made, WarmPoolLevel(paused=1, shells=1))
    # Of another template, whose own stock has nothing.
    empty = WarmPool(template, folder=tmp_path / "other", jail=Jail(), scheduler=made.scheduler)
    other = VmStarter(template=template, jail=Jail(), scheduler=made.scheduler, warm_pool=empty)
    async with asyncio.timeout(microvms.COMMAND_LIMIT_S):
        found = [await begun(other, tmp_path, name) for name in ("first", "second")]
    assert [each.kind for each in found] == [StartKind.SPAWN, StartKind.SPAWN]
    assert made.warm_pool.level == NONE
    for each in found:
        await each.guest.destroy()
    await holds(made, WarmPoolLevel(paused=1, shells=1))
    await made.warm_pool.close()


async def test_a_closed_stock_leaves_no_process_and_no_file(
    template: QemuTemplate, tmp_path: Path
) -> None:
    made = starter(template, tmp_path)
    made.warm_pool.set_target(WarmPoolTarget(paused=1, shells=2, max_shells=2))
    await holds(made, WarmPoolLevel(paused=1, shells=2))
    pids = [made.warm_pool._paused[0].vm.pid, *(vm.pid for vm in made.warm_pool._shells)]
    await made.warm_pool.close()
    assert not any(is_there(pid) for pid in pids)
    assert not any((tmp_path / "stock").iterdir())
