"""VMs whose guests write to a disk: more than memory holds, and saved with their memory."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.environments.sandbox_states import LIMITS, States
from tests.support.vm import microvms
from tests.support.vm.microvms import Lab

from etude.common.errors import CorruptError
from etude.envserver.drivers.vm import disk
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.guest.commands import GuestCommands
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage.folders import FolderLimits, TooLargeError

MIB = 1 << 20
LIMIT_S = 180.0
MAKE = "dd if=/dev/urandom of=/var/random bs=1M count=8 2>/dev/null; md5sum /var/random; sync"
CHECK = "echo 3 > /proc/sys/vm/drop_caches; md5sum /var/random"
CHILDREN = 3


async def test_clones_write_to_disks_of_their_own(lab: Lab) -> None:
    one, other = await lab.guest(), await lab.guest()
    made = await one.sh(MAKE)
    assert await one.sh(CHECK) == made
    assert await other.sh("ls /var/random 2>/dev/null || echo none") == "none"
    size_mib = int(await one.sh("df -m / | tail -n 1 | awk '{print $2}'"))
    assert 100 < size_mib <= microvms.DISK_MIB


async def test_a_saved_vm_has_the_disk_of_the_moment_and_its_parent_goes_on(lab: Lab) -> None:
    parent = await lab.guest()
    made = await parent.sh(MAKE)
    saved = await lab.save(parent)
    await parent.sh("rm /var/random; echo later > /var/later; sync")
    child = await lab.guest(saved)
    assert await child.sh(CHECK) == made
    assert await child.sh("ls /var/later 2>/dev/null || echo none") == "none"
    assert await parent.sh("cat /var/later") == "later"
    again = await lab.guest(saved)
    assert await again.sh(CHECK) == made
    saved.close()


async def test_what_is_not_flushed_yet_is_saved_too(lab: Lab) -> None:
    parent = await lab.guest()
    saved_words = await parent.sh("seq 1 200000 > /var/words; md5sum < /var/words")
    saved = await lab.save(parent)
    child = await lab.guest(saved)
    assert await child.sh("sync; echo 3 > /proc/sys/vm/drop_caches; md5sum < /var/words") == (
        saved_words
    )
    saved.close()


async def test_a_full_disk_is_an_error_of_the_command_and_the_vm_goes_on(lab: Lab) -> None:
    guest = await lab.guest()
    commands = GuestCommands(channel=guest.channel, uid=0)
    done = await commands.run("dd if=/dev/zero of=/var/zeros bs=1M count=500", LIMIT_S)
    assert done.ended_for == "disk" or b"No space left on device" in done.output
    assert await guest.sh("rm /var/zeros; echo on > /var/on; cat /var/on") == "on"


async def test_a_vm_whose_host_has_no_room_is_ended(lab: Lab, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounting = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)
    )
    if await mounting.wait():
        pytest.skip("this user may not mount")
    try:
        other = Lab(lab.template, small)
        guest = await other.guest()
        with pytest.raises(Exception, match=r"lost|ended|closed"):
            await guest.sh("dd if=/dev/urandom of=/var/random bs=1M count=40; sync")
        await asyncio.wait_for(asyncio.shield(guest.vm.exited), LIMIT_S)
        await other.close()
    finally:
        unmounting = await asyncio.create_subprocess_exec("umount", "-l", str(small))
        await unmounting.wait()


@pytest_asyncio.fixture
async def states(image: BuiltImage, tmp_path: Path) -> AsyncIterator[States]:
    driver = QemuDriver(
        scratch=tmp_path / "node", images={image.name: image}, machine=microvms.small_machine()
    )
    await driver.start()
    made = States(driver, image.name, tmp_path / "node")
    yield made
    await made.close()
    await driver.stop()


async def test_a_suspended_vm_comes_back_with_more_than_its_memory_holds(states: States) -> None:
    sandbox = await states.begun("one")
    fill = "for n in 1 2 3; do dd if=/dev/urandom of=big-$n bs=1M count=30 2>/dev/null; done"
    made = await sandbox.run(f"{fill}; cat big-* | md5sum", LIMIT_S)
    await sandbox.pause()
    kept = [path.name for path in (states.driver.leases / "one").iterdir() if path.is_file()]
    assert sorted(name.partition("-")[0].partition(".")[0] for name in kept) == ["asleep", "disk"]
    await sandbox.resume()
    assert (await sandbox.run("cat big-* | md5sum", LIMIT_S)).output == made.output
    kept = [path.name for path in (states.driver.leases / "one").iterdir() if path.is_file()]
    assert kept == []


async def test_forks_of_one_moment_have_its_disk_and_one_each(states: States) -> None:
    parent = await states.begun("parent")
    made = await parent.run("dd if=/dev/urandom of=big bs=1M count=20; md5sum < big", LIMIT_S)
    folder, saved = await states.saved(parent, "s")
    assert saved.num_bytes > 20 * MIB
    await parent.run("echo other > big", LIMIT_S)
    children = [states.new(f"child-{number}") for number in range(CHILDREN)]
    for child in children:
        await child.restore(folder, saved)

    async def own(number: int) -> bytes:
        command = f"md5sum < big; echo {number} > own; sync; cat own"
        return (await children[number].run(command, LIMIT_S)).output

    seen = await asyncio.gather(*(own(number) for number in range(CHILDREN)))
    digest = made.output.splitlines()[-1]
    assert seen == [b"%s\n%d\n" % (digest, number) for number in range(CHILDREN)]


async def test_a_rollback_undoes_what_was_written(states: States) -> None:
    sandbox = await states.begun("one")
    await sandbox.run("echo before > state", LIMIT_S)
    folder, saved = await states.saved(sandbox, "s")
    for _ in range(2):
        await sandbox.run("echo after > state; dd if=/dev/zero of=more bs=1M count=30", LIMIT_S)
        await sandbox.restore(folder, saved)
        assert (await sandbox.run("cat state; ls", LIMIT_S)).output.split()[0] == b"before"
        assert b"more" not in (await sandbox.run("ls", LIMIT_S)).output


async def test_a_snapshot_whose_disk_is_missing_or_damaged_is_refused(states: States) -> None:
    sandbox = await states.begun("one")
    folder, saved = await states.saved(sandbox, "s")
    (kept,) = folder.glob("disk-*")
    whole = folder / "whole"
    shutil.copyfile(kept, whole)
    with kept.open("r+b") as file:
        file.seek(70 * MIB)
        file.write(b"x")
    with pytest.raises(CorruptError, match="damaged"):
        await states.new("other").restore(folder, saved)
    kept.unlink()
    with pytest.raises(CorruptError):
        await states.new("third").restore(folder, saved)
    whole.rename(kept)
    await states.new("fourth").restore(folder, saved)


async def test_a_disk_counts_for_the_size_of_a_snapshot(states: States) -> None:
    sandbox = await states.begun("one")
    await sandbox.run("dd if=/dev/urandom of=big bs=1M count=40; sync", LIMIT_S)
    _, saved = await states.saved(sandbox, "s")
    assert 40 * MIB < saved.num_bytes < LIMITS.max_bytes


async def test_a_disk_that_is_larger_than_a_snapshot_may_be_is_not_copied(
    states: States, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await states.begun("one")
    await sandbox.run("dd if=/dev/urandom of=big bs=1M count=40; sync", LIMIT_S)
    monkeypatch.setattr(disk, "copy_open", lambda *_: pytest.fail("it was copied"))
    with pytest.raises(TooLargeError):
        await sandbox.save(tmp_path, FolderLimits(max_files=100, max_bytes=20 * MIB))
