"""Saving machines while they run, and what comes back; QEMU itself is the oracle."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.vm.microvms import Guest, Lab

from etude.envserver.drivers.vm import delta_file, sealed_files
from etude.envserver.drivers.vm.dirty_pages import PAGE_BYTES, read_dirty_pages
from etude.envserver.drivers.vm.errors import FormatError, IntegrityError, VmmError
from etude.envserver.drivers.vm.interface import VmDelta
from etude.envserver.drivers.vm.qemu import delta
from etude.envserver.drivers.vm.qemu.migration import device_state
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.drivers.vm.qemu.vm import QemuVm

MAKE = "dd if=/dev/urandom of=/tmp/random bs=1M count={} 2>/dev/null; md5sum /tmp/random"
CHECK = "md5sum /tmp/random"


def memory_of(vm: QemuVm, template: QemuTemplate) -> bytes:
    """All of a stopped machine's memory, by a way that knows no changed pages."""
    inode = f" {os.fstat(template.memory).st_ino} "
    lines = Path(f"/proc/{vm.pid}/maps").read_text().splitlines()
    (line,) = (line for line in lines if inode in line)
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    with Path(f"/proc/{vm.pid}/mem").open("rb", buffering=0) as file:
        found = os.pread(file.fileno(), end - start, start)
    assert len(found) == template.machine.memory_bytes
    return found


async def devices_of(vm: QemuVm) -> bytes:
    state = await device_state(vm)
    await state.save()
    found = state.content()
    await state.close()
    return found


async def test_a_running_clone_is_saved_and_comes_back_with_its_memory(lab: Lab) -> None:
    parent = await lab.guest()
    made = await parent.sh(MAKE.format(16))
    saved = await lab.save(parent)
    assert (await parent.vm.qmp.execute("query-status"))["status"] == "running"
    assert await parent.sh(CHECK) == made
    assert not saved.is_full
    assert 16 << 20 <= saved.changed_bytes < 64 << 20
    child = await lab.guest(saved)
    assert await child.sh(CHECK) == made
    saved.close()


async def test_a_fork_of_a_fork_is_as_small_as_the_first(lab: Lab) -> None:
    parent = await lab.guest()
    made = await parent.sh(MAKE.format(4))
    first = await lab.save(parent)
    child = await lab.guest(first)
    await child.sh("echo child > /tmp/child")
    second = await lab.save(child)
    grandchild = await lab.guest(second)
    assert await grandchild.sh(CHECK) == made
    assert await grandchild.sh("cat /tmp/child") == "child"
    assert await parent.sh("ls /tmp/child || true") != "/tmp/child"
    assert second.changed_bytes < first.changed_bytes + (8 << 20)
    for each in (first, second):
        each.close()


async def test_a_rollback_undoes_what_came_after_the_snapshot(lab: Lab) -> None:
    guest = await lab.guest()
    await guest.sh("echo before > /tmp/state")
    saved = await lab.save(guest)
    await guest.sh("echo after > /tmp/state; echo more > /tmp/more")
    await guest.vm.destroy()
    again = await lab.guest(saved)
    assert await again.sh("cat /tmp/state; ls /tmp") == "before\nstate"
    saved.close()


async def test_a_vm_restored_from_a_delta_stands_still_until_it_is_told_to_run(
    lab: Lab,
) -> None:
    saved = await lab.save(await lab.guest())
    vm = await lab.paused(saved)
    assert (await vm.qmp.execute("query-status"))["status"] == "paused"
    saved.close()


async def test_a_delta_restores_what_qemus_own_full_stream_restores(
    lab: Lab, template: QemuTemplate
) -> None:
    parent = await lab.guest()
    await parent.sh(MAKE.format(8))
    small = await lab.save(parent, keep_running=False)
    of_parent = memory_of(parent.vm, template)
    pause = delta.GuestPause(parent.vm, keep_running=False, disk=lab.folder / "full-disk")
    full = await delta.save_full(pause, template)
    assert full.is_full
    by_delta, by_full = await lab.paused(small), await lab.paused(full)
    assert hashlib.sha256(memory_of(by_delta, template)).digest() == digest_of(of_parent)
    assert hashlib.sha256(memory_of(by_full, template)).digest() == digest_of(of_parent)
    assert await devices_of(by_delta) == await devices_of(by_full)
    for each in (small, full):
        each.close()


async def test_only_the_wall_clock_and_the_hosts_end_of_the_channel_differ_from_the_parents(
    lab: Lab,
) -> None:
    parent = await lab.guest()
    saved = await lab.save(parent, keep_running=False)
    of_parent = sections(await devices_of(parent.vm))
    of_child = sections(await devices_of(await lab.paused(saved)))
    assert of_parent.keys() == of_child.keys()
    assert {"timer", "cpu", "i8254", "apic"} <= of_parent.keys()
    differing = {name for name in of_parent if of_parent[name] != of_child[name]}
    assert {name.rpartition("/")[2] for name in differing} <= {"mc146818rtc", "virtio-console"}
    saved.close()


def sections(state: bytes) -> dict[str, bytes]:
    """What xen-save-devices-state wrote, by device; the tests' machines have one of each."""
    found, at = {}, 8
    while state[at] == 4:
        number, length = state[at + 1 : at + 5], state[at + 5]
        name = state[at + 6 : at + 6 + length].decode("ascii")
        end = state.index(b"\x7e" + number, at)
        found[name] = state[at:end]
        at = end + 5
    assert state[at:] == b"\0", f"what follows {list(found)[-1]}"
    return found


def digest_of(memory: bytes) -> bytes:
    return hashlib.sha256(memory).digest()


async def test_every_page_that_differs_from_the_template_is_among_the_changed_ones(
    lab: Lab, template: QemuTemplate
) -> None:
    guest = await lab.guest()
    await guest.sh(MAKE.format(2))
    await guest.vm.freeze()
    base, now = sealed_files.read_all(template.memory), memory_of(guest.vm, template)
    found = read_dirty_pages(guest.vm.pid, template.memory, lab.buffer)
    different = {
        number
        for number in range(len(base) // PAGE_BYTES)
        if base[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        != now[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
    }
    assert different
    assert different <= set(found.numbers)
    for index, number in enumerate(found.numbers):
        page = found.content[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
        assert page == now[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


async def test_a_stored_delta_comes_back_and_a_touched_one_never_reaches_a_monitor(
    lab: Lab, template: QemuTemplate, tmp_path: Path
) -> None:
    guest = await lab.guest()
    made = await guest.sh(MAKE.format(1))
    saved, path, key = await lab.save(guest), tmp_path / "delta", b"k" * delta_file.KEY_BYTES
    delta_file.save(saved, path, key=key)
    found = delta_file.load(path, key=key, template=template.address)
    assert await (await lab.guest(found)).sh(CHECK) == made
    found.close()
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-5000] + b"x" + whole[-4999:], whole[:500]):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError):
            delta_file.load(path, key=key, template=template.address)
    saved.close()


async def test_a_truncated_stream_is_refused_by_the_monitor_too(
    lab: Lab, template: QemuTemplate
) -> None:
    saved = await lab.save(await lab.guest())
    whole = sealed_files.read_all(saved.stream)
    cut = VmDelta(
        template=template.address,
        is_full=False,
        stream=sealed_files.create_sealed("cut", [whole[: len(whole) // 2]]),
        changed_bytes=0,
        disk=os.dup(saved.disk),
    )
    with pytest.raises(VmmError, match="load of migration failed"):
        await lab.paused(cut)
    for each in (saved, cut):
        each.close()


async def test_a_delta_of_another_template_is_refused(lab: Lab) -> None:
    saved = await lab.save(await lab.guest())
    foreign = replace(saved, template="00" * 32)
    with pytest.raises(VmmError, match="is of template 00"):
        await lab.paused(foreign)
    saved.close()


async def test_a_template_of_unknown_format_is_saved_as_a_full_stream(
    lab: Lab, template: QemuTemplate
) -> None:
    unknown = replace(template, stream=FormatError("another QEMU"))
    other = Lab(unknown, lab.folder / "other")
    other.folder.mkdir()
    guest: Guest = await other.guest()
    made = await guest.sh(MAKE.format(1))
    saved = await other.save(guest)
    assert saved.is_full
    assert await guest.sh(CHECK) == made
    assert await (await other.guest(saved)).sh(CHECK) == made
    saved.close()
    await other.close()
