"""Several that begin with one saved machine at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.environments.sandbox_states import States
from tests.support.vm import microvms

from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.drivers.vm.qemu.fork_server.supervisor import ForkServerSupervisor
from etude.envserver.drivers.vm.qemu.vm import QemuVm
from etude.envserver.images.built_image import BuiltImage

CHILDREN = 6
LIMIT_S = 120


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


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[QemuVm]:
    """What was split off so far."""
    found: list[QemuVm] = []
    splitting = ForkServerSupervisor.spawn

    async def noted(keeper: ForkServerSupervisor, folder: Path) -> QemuVm | None:
        part = await splitting(keeper, folder)
        found.extend([part] if part is not None else [])
        return part

    monkeypatch.setattr(ForkServerSupervisor, "spawn", noted)
    return found


async def test_children_of_one_moment_are_split_off_from_it(
    states: States, parts: list[QemuVm]
) -> None:
    parent = await states.begun("parent")
    await parent.run("echo here > /tmp/memory", LIMIT_S)
    parts.clear()
    folder, saved = await states.saved(parent, "s")
    children = [states.new(f"child-{number}") for number in range(CHILDREN)]
    for child in children:
        await child.restore(folder, saved)

    async def differs(number: int) -> bytes:
        told = await children[number].run(
            f"echo {number} >> /tmp/memory; cat /tmp/memory; hostname", LIMIT_S
        )
        return told.output

    seen = await asyncio.gather(*(differs(number) for number in range(CHILDREN)))
    assert seen == [f"here\n{number}\nchild-{number}\n".encode() for number in range(CHILDREN)]
    assert len(parts) >= CHILDREN - 2


async def test_what_one_after_the_other_begins_with_is_restored_each_time(
    states: States, parts: list[QemuVm]
) -> None:
    parent = await states.begun("parent")
    parts.clear()
    folder, saved = await states.saved(parent, "s")
    for number in range(2):
        await parent.run(f"echo {number} > /tmp/memory", LIMIT_S)
        await parent.restore(folder, saved)
        assert (await parent.run("cat /tmp/memory 2>/dev/null || echo none", LIMIT_S)).output == (
            b"none\n"
        )
    assert parts == []
