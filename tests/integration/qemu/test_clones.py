"""Clones of a sealed template in a jail."""

import asyncio
import hashlib
import os
import re
import signal
from pathlib import Path

import pytest
from tests.support.vm import microvms
from tests.support.vm.microvms import Lab

from etude.envserver.drivers.vm import sealed_files
from etude.envserver.drivers.vm.errors import VmmError
from etude.envserver.drivers.vm.jail import NOBODY
from etude.envserver.drivers.vm.qemu.migration import receive
from etude.envserver.drivers.vm.qemu.template import QemuTemplate


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def limits_of(pid: int) -> str:
    return Path(f"/proc/{pid}/limits").read_text()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def highest_file() -> int:
    return max(int(each.name) for each in Path("/proc/self/fd").iterdir())


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_clone_answers_and_is_a_vm_of_its_own(lab: Lab) -> None:
    one, other = await lab.guest(), await lab.guest()
    await one.sh("echo one > /tmp/name")
    assert await other.sh("ls /tmp/name || echo none") != "/tmp/name"
    assert await one.sh("cat /tmp/name") == "one"
    assert await one.sh("hostname") != await other.sh("hostname")


async def test_a_restored_clone_stands_still_until_it_is_told_to_run(lab: Lab) -> None:
    vm = await lab.paused()
    assert (await vm.qmp.execute("query-status"))["status"] == "paused"


async def test_a_clone_runs_without_rights(lab: Lab) -> None:
    vm = await lab.paused()
    found = status(vm.pid)
    assert found["Uid"].split() == [str(NOBODY)] * 4
    assert found["Groups"] == ""
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(found[kind], 16) == 0, kind
    assert found["NoNewPrivs"] == "1"
    assert found["Seccomp"] == "2"
    limits = limits_of(vm.pid)
    assert re.search(r"Max core file size +0 ", limits)
    files = re.search(r"Max open files +(\d+) ", limits)
    assert files is not None
    # A descriptor that it inherits has the number that it has here, where a few were open only
    # while it was made.
    assert 128 <= int(files[1]) <= max(128, highest_file() + 16)


async def test_a_clone_takes_memory_in_small_pages_and_its_host_does_not(lab: Lab) -> None:
    vm = await lab.paused()
    assert status(vm.pid)["THP_enabled"] == "0"
    assert status(os.getpid())["THP_enabled"] == "1"


async def test_a_clone_cannot_write_the_template(lab: Lab, template: QemuTemplate) -> None:
    before = hashlib.sha256(sealed_files.read_all(template.memory)).digest()
    guest = await lab.guest()
    await guest.sh("dd if=/dev/urandom of=/tmp/noise bs=1M count=8 2>/dev/null")
    assert hashlib.sha256(sealed_files.read_all(template.memory)).digest() == before
    # Neither through its own descriptor, were it taken over.
    path = f"/proc/{guest.vm.pid}/fd/{template.memory}"
    descriptor = os.open(path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)


async def test_a_frozen_clone_uses_no_cpu_time_and_goes_on_where_it_was(lab: Lab) -> None:
    guest = await lab.guest()
    await guest.sh("(while true; do :; done) & echo $! > /tmp/busy; sleep 0.1")
    running = ticks(guest.vm.pid)
    await asyncio.sleep(1)
    busy = ticks(guest.vm.pid) - running
    await guest.vm.freeze()
    before = ticks(guest.vm.pid)
    await asyncio.sleep(1)
    assert ticks(guest.vm.pid) - before <= max(1, busy // 10)  # what the monitor does on its way
    await guest.vm.thaw()
    assert await guest.sh("echo on") == "on"


async def test_a_killed_monitor_is_noticed_and_destroyed_twice_without_harm(lab: Lab) -> None:
    guest = await lab.guest()
    os.kill(guest.vm.pid, signal.SIGKILL)
    async with asyncio.timeout(microvms.COMMAND_LIMIT_S):
        assert await guest.vm.exited == -signal.SIGKILL
    with pytest.raises(VmmError):
        await guest.vm.freeze()
    await guest.vm.destroy()
    await guest.vm.destroy()
    assert not guest.vm.folder.exists()


async def test_clones_leave_nothing_open_and_no_process(lab: Lab) -> None:
    first = await lab.guest()
    await first.channel.close()
    await first.vm.destroy()
    before = open_files()
    for _ in range(5):
        guest = await lab.guest()
        saved = await lab.save(guest)
        child = await lab.guest(saved)
        for each in (guest, child):
            await each.channel.close()
            await each.vm.destroy()
            assert not is_there(each.vm.pid)
        saved.close()
    assert open_files() == before


async def test_a_monitor_is_found_again_by_who_lost_its_connection(lab: Lab) -> None:
    guest = await lab.guest()
    await guest.vm.qmp.close()
    await guest.vm.connect()
    assert (await guest.vm.qmp.execute("query-status"))["status"] == "running"


async def test_what_is_no_state_ends_the_monitor_with_its_last_words(lab: Lab) -> None:
    shell = await lab.shell()
    garbled = sealed_files.create_sealed("garbled", [b"QEVM\0\0\0\3" + bytes(100)])
    with (
        sealed_files.reopen(garbled) as source,
        pytest.raises(VmmError, match="the VMM ended with 1"),
    ):
        await receive(shell, source, has_memory=False)
    os.close(garbled)
