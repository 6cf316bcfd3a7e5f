"""Machines whose guests write to a disk instead of their memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.vm import microvms
from tests.support.vm.microvms import Lab

from etude.envserver.drivers.vm.jail import Jail
from etude.envserver.drivers.vm.qemu import disk
from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.images.built_image import BuiltImage

MAKE = "dd if=/dev/urandom of=/root/random bs=1M count=8 2>/dev/null; md5sum /root/random; sync"
CHECK = "echo 3 > /proc/sys/vm/drop_caches; md5sum /root/random"


@pytest.fixture(scope="session")
def template(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QemuTemplate]:
    assert image.upper is None
    on_disk = microvms.small_image(with_disk=True)
    assert on_disk.upper is not None
    folder = tmp_path_factory.mktemp("disk")
    (folder / "vm").mkdir()
    layers = disk.boot_disk(on_disk.upper, folder=folder, jail=Jail())
    machine = microvms.small_machine(with_disk=True)
    made = asyncio.run(microvms.booted(on_disk, machine, folder / "vm", layers))
    yield made
    made.close()


@pytest.fixture
async def lab(template: QemuTemplate, tmp_path: Path) -> AsyncIterator[Lab]:
    made = Lab(template, tmp_path)
    yield made
    await made.close()


async def test_clones_write_to_disks_of_their_own(lab: Lab) -> None:
    one, other = await lab.guest(), await lab.guest()
    made = await one.sh(MAKE)
    assert await one.sh(CHECK) == made
    assert await other.sh("ls /root") == ""


async def test_a_fork_has_the_disk_of_the_moment_and_the_parent_goes_on(lab: Lab) -> None:
    parent = await lab.guest()
    made = await parent.sh(MAKE)
    saved = await lab.save(parent)
    # What is on the disk is not in the memory: the delta stays smaller than the file.
    await parent.sh("echo later > /root/later; sync")
    child = await lab.guest(saved)
    assert await child.sh(CHECK) == made
    assert await child.sh("ls /root") == "random"
    assert await parent.sh(CHECK) == made
    assert await parent.sh("cat /root/later") == "later"
    saved.close()


async def test_a_fork_of_a_fork_and_a_rollback_find_their_disks(lab: Lab) -> None:
    parent = await lab.guest()
    made = await parent.sh(MAKE)
    first = await lab.save(parent)
    child = await lab.guest(first)
    await child.sh("echo child > /root/child; sync")
    second = await lab.save(child)
    await child.sh("rm /root/random; sync")
    await child.vm.destroy()
    grandchild = await lab.guest(second)
    assert await grandchild.sh(CHECK) == made
    assert await grandchild.sh("cat /root/child") == "child"
    again = await lab.guest(first)
    assert await again.sh("ls /root") == "random"
    for each in (first, second):
        each.close()
