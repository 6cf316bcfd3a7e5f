"""Machines that nobody calls: stopped, written to the disk, and there again with the next call."""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support import microvms

from etude.envserver.drivers.vm.dirty_pages import PageBuffer
from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu.template import Template
from etude.envserver.drivers.vm.start.start_scheduler import Lanes
from etude.envserver.drivers.vm.start.starter import Started, Starter
from etude.envserver.drivers.vm.start.warm_pool import Stock
from etude.envserver.drivers.vm.suspend.auto_suspend import RestingGuest
from etude.envserver.drivers.vm.suspend.idle_policy import Patience, State
from etude.envserver.drivers.vm.suspend.lease_vm import Bed, Home, asleep
from etude.envserver.guest.channel import GuestLostError
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.guest.jobs import GuestJobs

FREEZES = Patience(linger_s=0.01, job_s=3600.0, frozen_s=3600.0, drift_s=0.0)
SLEEPS = Patience(linger_s=0.01, job_s=1.0, frozen_s=0.01)
HASTY = Patience(linger_s=0.0, job_s=0.0, frozen_s=0.0)


@pytest.fixture
async def home(template: Template, tmp_path: Path) -> AsyncIterator[Home]:
    lanes = Lanes(cores=2, room=100)
    stock = Stock(template, folder=tmp_path / "stock", jail=Jail(), lanes=lanes)
    starter = Starter(base=template, jail=Jail(), lanes=lanes, stock=stock)
    lease = tmp_path / "lease"
    lease.mkdir()

    async def start(folder: Path) -> Started:
        return await starter.start(lease.name, folder)

    yield Home(
        lease=lease,
        start=start,
        starter=lambda: starter,
        bed=Bed(key=secrets.token_bytes(32), buffer=PageBuffer(1 << 20)),
        places=lanes.places,
        patience=FREEZES,
    )
    await stock.close()


def with_patience(home: Home, patience: Patience) -> Home:
    return Home(
        lease=home.lease,
        start=home.start,
        starter=home.starter,
        bed=home.bed,
        places=home.places,
        patience=patience,
    )


async def launched(home: Home) -> RestingGuest:
    folder = home.lease / "machine"
    folder.mkdir(mode=0o700)
    guest, _ = await home.launch(folder)
    async with guest.awake():
        await guest.machine.keep()
    return guest


async def becomes(guest: RestingGuest, state: State) -> None:
    async with asyncio.timeout(microvms.COMMAND_LIMIT_S):
        while guest.state is not state:  # noqa: ASYNC110 - there is no event for tests alone
            await asyncio.sleep(0.01)


async def sh(guest: RestingGuest, command: str) -> str:
    commands = GuestCommands(channel=guest, uid=0)
    done = await commands.run(command, microvms.COMMAND_LIMIT_S)
    assert done.exit_code == 0, (command, done)
    return done.output.decode().strip()


async def test_a_machine_that_nobody_calls_stands_still_until_somebody_does(home: Home) -> None:
    guest = await launched(home)
    await becomes(guest, State.FROZEN)
    vm = guest.machine._awake.vm  # type: ignore[attr-defined]
    assert (await vm.qmp.execute("query-status"))["status"] == "paused"
    assert home.places.taken == 0
    await asyncio.sleep(1.2)
    assert abs(int(await sh(guest, "date +%s")) - time.time()) < 60
    await becomes(guest, State.FROZEN)
    await guest.destroy()


async def test_a_machine_that_sleeps_takes_no_memory_and_comes_back_as_it_was(home: Home) -> None:
    guest = await launched(with_patience(home, SLEEPS))
    line = "echo here > /tmp/here; md5sum /etc/machine-id /tmp/here; hostname"
    before = await sh(guest, line)
    await becomes(guest, State.SAVED)
    path = asleep(home.lease)
    assert path is not None
    assert not (home.lease / "machine").exists()
    assert path.stat().st_size < 16 << 20
    assert await sh(guest, "md5sum /etc/machine-id /tmp/here; hostname") == before
    await guest.destroy()


async def test_a_command_in_the_background_goes_on_after_sleep(home: Home) -> None:
    guest = await launched(with_patience(home, SLEEPS))
    jobs = GuestJobs(channel=guest)
    number = await jobs.start("read line; echo $line; sleep 600", timeout_s=None)
    await becomes(guest, State.SAVED)
    await jobs.send(number, b"awake\n", end=False)
    await becomes(guest, State.SAVED)
    assert (await jobs.state(number)).is_running
    assert await jobs.output(number, offset=0, size=100) == b"awake\n"
    await jobs.kill(number)
    assert not (await jobs.state(number)).is_running
    await guest.destroy()


async def test_a_command_in_the_background_keeps_its_machine_running(home: Home) -> None:
    guest = await launched(home)
    jobs = GuestJobs(channel=guest)
    await jobs.start("sleep 0.5; echo done > /tmp/done", timeout_s=None)
    assert guest._seen.num_jobs == 1
    # The guest tells of the end by itself, which it could not if it stood still.
    await becomes(guest, State.FROZEN)
    assert guest._seen.num_jobs == 0
    assert await sh(guest, "cat /tmp/done") == "done"
    await guest.destroy()


async def test_a_successor_wakes_what_its_predecessor_put_to_sleep(home: Home) -> None:
    guest = await launched(home)
    await sh(guest, "echo here > /tmp/here")
    await guest.rest()
    found = home.find(None)
    assert found is not None
    assert found.state is State.SAVED
    assert await sh(found, "cat /tmp/here") == "here"
    assert found.machine._awake.identity.generation == 2  # type: ignore[attr-defined]
    await found.rest()
    assert await sh(found, "cat /tmp/here") == "here"
    await found.destroy()
    await guest.destroy()


async def test_what_was_changed_on_the_disk_is_not_believed(home: Home) -> None:
    guest = await launched(home)
    await guest.rest()
    path = asleep(home.lease)
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


async def test_calls_at_any_moment_are_answered(home: Home) -> None:
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


async def test_a_machine_that_died_while_it_stood_still_is_lost_and_said_so(home: Home) -> None:
    guest = await launched(home)
    await becomes(guest, State.FROZEN)
    await guest.machine._awake.vm.kill()  # type: ignore[attr-defined]
    with pytest.raises(GuestLostError):
        await sh(guest, "true")
    assert guest.state is State.ENDED
    await guest.destroy()
    assert home.places.taken == 0
