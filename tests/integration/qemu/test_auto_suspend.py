"""Machines that nobody calls: stopped, written to the disk, and there again with the next call."""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.vm import microvms

from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.start.start_scheduler import StartScheduler
from etude.envserver.drivers.vm.start.starter import StartedVm, VmStarter
from etude.envserver.drivers.vm.start.warm_pool import WarmPool
from etude.envserver.drivers.vm.suspend.auto_suspend import AutoSuspendingVm
from etude.envserver.drivers.vm.suspend.idle_policy import IdleTimeouts, PowerState
from etude.envserver.drivers.vm.suspend.lease_vm import SuspendStore, VmContext, suspended_file
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.jobs import GuestJobs

FREEZES = IdleTimeouts(linger_s=0.01, job_s=3600.0, frozen_s=3600.0, drift_s=0.0)
SLEEPS = IdleTimeouts(linger_s=0.01, job_s=1.0, frozen_s=0.01)
HASTY = IdleTimeouts(linger_s=0.0, job_s=0.0, frozen_s=0.0)


@pytest.fixture
async def home(template: QemuTemplate, tmp_path: Path) -> AsyncIterator[VmContext]:
    lanes = StartScheduler(cores=2, room=100)
    stock = WarmPool(template, folder=tmp_path / "stock", jail=Jail(), scheduler=lanes)
    starter = VmStarter(template=template, jail=Jail(), scheduler=lanes, warm_pool=stock)
    lease = tmp_path / "lease"
    lease.mkdir()

    async def start(folder: Path) -> StartedVm:
        return await starter.start(lease.name, folder)

    yield VmContext(
        lease=lease,
        start=start,
        starter=lambda: starter,
        suspend_store=SuspendStore(key=secrets.token_bytes(32), buffer=PageBuffer(1 << 20)),
        run_slots=lanes.run_slots,
        idle_timeouts=FREEZES,
    )
    await stock.close()


def with_patience(home: VmContext, patience: IdleTimeouts) -> VmContext:
    return VmContext(
        lease=home.lease,
        start=home.start,
        starter=home.starter,
        suspend_store=home.suspend_store,
        run_slots=home.run_slots,
        idle_timeouts=patience,
    )


async def launched(home: VmContext) -> AutoSuspendingVm:
    folder = home.lease / "machine"
    folder.mkdir(mode=0o700)
    guest, _ = await home.launch(folder)
    async with guest.keep_running():
        await guest.vm.record_use()
    return guest


async def becomes(guest: AutoSuspendingVm, state: PowerState) -> None:
    async with asyncio.timeout(microvms.COMMAND_LIMIT_S):
        while guest.state is not state:  # noqa: ASYNC110 - there is no event for tests alone
            await asyncio.sleep(0.01)


async def sh(guest: AutoSuspendingVm, command: str) -> str:
    commands = GuestCommands(channel=guest, uid=0)
    done = await commands.run(command, microvms.COMMAND_LIMIT_S)
    assert done.exit_code == 0, (command, done)
    return done.output.decode().strip()


async def test_a_vm_that_nobody_calls_stands_still_until_somebody_does(
    home: VmContext,
) -> None:
    guest = await launched(home)
    await becomes(guest, PowerState.FROZEN)
    vm = guest.vm._in_memory.vm  # type: ignore[attr-defined]
    assert (await vm.qmp.execute("query-status"))["status"] == "paused"
    assert home.run_slots.taken == 0
    await asyncio.sleep(1.2)
    assert abs(int(await sh(guest, "date +%s")) - time.time()) < 60
    await becomes(guest, PowerState.FROZEN)
    await guest.destroy()


async def test_a_vm_that_sleeps_takes_no_memory_and_comes_back_as_it_was(
    home: VmContext,
) -> None:
    guest = await launched(with_patience(home, SLEEPS))
    line = "echo here > /tmp/here; md5sum /etc/machine-id /tmp/here; hostname"
    before = await sh(guest, line)
    await becomes(guest, PowerState.SAVED)
    path = suspended_file(home.lease)
    assert path is not None
    assert not (home.lease / "machine").exists()
    assert path.stat().st_size < 16 << 20
    assert await sh(guest, "md5sum /etc/machine-id /tmp/here; hostname") == before
    await guest.destroy()


async def test_a_command_in_the_background_goes_on_after_sleep(home: VmContext) -> None:
    guest = await launched(with_patience(home, SLEEPS))
    jobs = GuestJobs(channel=guest)
    number = await jobs.start("read line; echo $line; sleep 600", timeout_s=None)
    await becomes(guest, PowerState.SAVED)
    await jobs.send(number, b"awake\n", end=False)
    await becomes(guest, PowerState.SAVED)
    assert (await jobs.state(number)).is_running
    assert await jobs.output(number, offset=0, size=100) == b"awake\n"
    await jobs.kill(number)
    assert not (await jobs.state(number)).is_running
    await guest.destroy()


async def test_a_command_in_the_background_keeps_its_vm_running(home: VmContext) -> None:
    guest = await launched(home)
    jobs = GuestJobs(channel=guest)
    await jobs.start("sleep 0.5; echo done > /tmp/done", timeout_s=None)
    assert guest._idleness.num_jobs == 1
    # The guest tells of the end by itself, which it could not if it stood still.
    await becomes(guest, PowerState.FROZEN)
    assert guest._idleness.num_jobs == 0
    assert await sh(guest, "cat /tmp/done") == "done"
    await guest.destroy()


async def test_a_successor_wakes_what_its_predecessor_put_to_sleep(home: VmContext) -> None:
    guest = await launched(home)
    await sh(guest, "echo here > /tmp/here")
    await guest.suspend()
    found = home.find(None)
    assert found is not None
    assert found.state is PowerState.SAVED
    assert await sh(found, "cat /tmp/here") == "here"
    assert found.vm._in_memory.identity.generation == 2  # type: ignore[attr-defined]
    await found.suspend()
    assert await sh(found, "cat /tmp/here") == "here"
    await found.destroy()
    await guest.destroy()


async def test_what_was_changed_on_the_disk_is_not_believed(home: VmContext) -> None:
    guest = await launched(home)
    await guest.suspend()
    path = suspended_file(home.lease)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(GuestLostError, match="not written by this host"):
        await sh(guest, "true")
    data[-100] ^= 1
    path.write_bytes(data)
    assert await sh(guest, "echo again") == "again"
    await guest.destroy()


async def test_calls_at_any_moment_are_answered(home: VmContext) -> None:
    dice = random.Random(11)
    guest = await launched(with_patience(home, HASTY))

    async def caller(name: int) -> None:
        for number in range(4):
            await asyncio.sleep(dice.random() / 5)
            await sh(guest, f"echo {number} >> /tmp/{name}")

    await asyncio.gather(*(caller(name) for name in range(3)))
    for name in range(3):
        assert await sh(guest, f"cat /tmp/{name}") == "0\n1\n2\n3"
    await guest.destroy()


async def test_a_vm_that_died_while_it_stood_still_is_lost_and_said_so(
    home: VmContext,
) -> None:
    guest = await launched(home)
    await becomes(guest, PowerState.FROZEN)
    await guest.vm._in_memory.vm.kill()  # type: ignore[attr-defined]
    with pytest.raises(GuestLostError):
        await sh(guest, "true")
    assert guest.state is PowerState.ENDED
    await guest.destroy()
    assert home.run_slots.taken == 0
