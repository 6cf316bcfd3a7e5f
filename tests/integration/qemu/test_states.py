"""What the driver of microVMs does with the state of its sandboxes: memory included."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.support import microvms
from tests.support.sandbox_states import CHECKS, LIMITS, States

from etude.envserver import folders
from etude.envserver.drivers.qemu.driver import QemuDriver
from etude.envserver.images.build import Image

Check = Callable[[States], Awaitable[None]]
LIMIT_S = 120


@pytest.fixture(scope="module")
def started(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QemuDriver]:
    scratch = tmp_path_factory.mktemp("driver")
    made = QemuDriver(scratch=scratch, images={image.name: image}, machine=microvms.small_machine())
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


@pytest.fixture
async def states(started: QemuDriver, image: Image) -> AsyncIterator[States]:
    # Beside the leases: a snapshot's file gets a second name in each that begins with it.
    saved = started.scratch / "saved"
    saved.mkdir(mode=0o700)
    made = States(started, image.name, saved)
    yield made
    await made.close()
    shutil.rmtree(saved)
    for folder in started.leases.iterdir():
        folders.remove(folder)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_driver_keeps_the_contract(states: States, check: Check) -> None:
    await check(states)


async def test_memory_and_running_commands_are_saved_too(states: States) -> None:
    parent = await states.begun("parent")
    count = "for i in $(seq 1000); do echo $i > count; sleep 1; done"
    job = await parent.workspace.jobs.start(count, timeout_s=None)
    await parent.run("echo before > /tmp/memory", LIMIT_S)
    folder, saved = await states.saved(parent, "s")
    await parent.run("echo after > /tmp/memory", LIMIT_S)
    assert (await parent.workspace.jobs.state(job)).is_running

    child = states.new("child")
    await child.restore(folder, saved)
    await parent.restore(folder, saved)

    for each in (child, parent):
        assert (await each.run("cat /tmp/memory", LIMIT_S)).output == b"before\n"
        assert (await each.workspace.jobs.state(job)).is_running
        await each.workspace.jobs.kill(job)


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


async def test_a_machine_that_sleeps_is_saved_without_being_woken(states: States) -> None:
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


async def test_a_machine_that_died_can_be_put_back(states: States) -> None:
    sandbox = await states.begun("parent")
    folder, saved = await states.saved(sandbox, "s")
    assert sandbox._guest is not None  # type: ignore[attr-defined]
    await sandbox._guest.machine.destroy()  # type: ignore[attr-defined]

    await sandbox.restore(folder, saved)

    assert await sandbox.workspace.read("README") == b"read me\n"
