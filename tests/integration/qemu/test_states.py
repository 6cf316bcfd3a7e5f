"""What the driver of microVMs does with the state of its sandboxes: memory included."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.environments.sandbox_states import (
    LIMITS,
    MEMORY_CHECKS,
    States,
    siblings_start_equal_and_draw_random_numbers_of_their_own,
)
from tests.support.vm import microvms

from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage import folders

Check = Callable[[States], Awaitable[None]]
LIMIT_S = 120


# What a machine is split off from belongs to the loop that it was grown in.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(
    image: BuiltImage, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[QemuDriver]:
    scratch = tmp_path_factory.mktemp("driver")
    made = QemuDriver(scratch=scratch, images={image.name: image}, machine=microvms.small_machine())
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def states(started: QemuDriver, image: BuiltImage) -> AsyncIterator[States]:
    # Beside the leases: a snapshot's file gets a second name in each that begins with it.
    saved = started.scratch / "saved"
    saved.mkdir(mode=0o700)
    made = States(started, image.name, saved)
    yield made
    await made.close()
    shutil.rmtree(saved)
    for folder in started.leases.iterdir():
        folders.remove_folder(folder)


@pytest.mark.parametrize("check", MEMORY_CHECKS, ids=lambda check: check.__name__)
async def test_the_driver_keeps_the_contract(states: States, check: Check) -> None:
    await check(states)


@pytest.mark.long
async def test_sixteen_siblings_start_equal(states: States) -> None:
    await siblings_start_equal_and_draw_random_numbers_of_their_own(states, 16)


async def test_a_fork_has_a_name_of_its_own_and_other_random_numbers(states: States) -> None:
    parent = await states.begun("parent")
    folder, saved = await states.saved(parent, "s")
    children = [states.new(f"child-{number}") for number in range(2)]
    for child in children:
        await child.restore(folder, saved)

    look = "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | md5sum"
    seen = [(await each.run(look, LIMIT_S)).output.split() for each in (parent, *children)]

    assert [names[0] for names in seen] == [b"parent", b"child-0", b"child-1"]
    for place in (1, 2):
        assert len({names[place] for names in seen}) == 3


async def test_a_vm_that_sleeps_is_saved_without_being_woken(states: States) -> None:
    parent = await states.begun("parent")
    await parent.run("echo here > /tmp/memory", LIMIT_S)
    await parent.pause()
    folder = states.folder / "s"
    folder.mkdir()

    saved = await parent.save(folder, LIMITS)

    assert not (Path(states.driver.leases) / "parent" / "machine").exists()
    child = states.new("child")
    await child.restore(folder, saved)
    for each in (child, parent):
        assert (await each.run("cat /tmp/memory", LIMIT_S)).output == b"here\n"


async def test_a_vm_that_died_can_be_put_back(states: States) -> None:
    sandbox = await states.begun("parent")
    folder, saved = await states.saved(sandbox, "s")
    assert sandbox._guest is not None  # type: ignore[attr-defined]
    await sandbox._guest.vm.destroy()  # type: ignore[attr-defined]

    await sandbox.restore(folder, saved)

    assert await sandbox.workspace.read("README") == b"read me\n"
