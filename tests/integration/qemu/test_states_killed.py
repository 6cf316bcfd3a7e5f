"""A node of microVMs is killed while it works on a state; another one goes on with all of them."""

import asyncio
from pathlib import Path

import pytest
from tests.support.environments.killed_hosts import WRITE, die, killed, looked, order, sh
from tests.support.vm import microvms

from etude.envserver.drivers import folder_snapshots
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.drivers.vm.sandbox import VmSandbox
from etude.envserver.drivers.vm.suspend import snapshots
from etude.envserver.host.host import Host
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.envserver.images.built_image import BuiltImage
from etude.v1 import environments_pb2


def node_on(scratch: Path, image: BuiltImage) -> Host:
    driver = QemuDriver(scratch=scratch, images={"python": image}, machine=microvms.small_machine())
    return Host(driver=driver, sources=WorkspaceSources(scratch), slots=8, templates={"python"})


async def work_and_die(scratch: Path, image: BuiltImage, when: str) -> None:
    node = node_on(scratch, image)
    await node.driver.start()
    await node.take_over()
    await node.open(order(scratch, "a", "idle"))
    await sh(node, "a", "1", WRITE.format("one", "one"))
    await node.states.snapshot(node.find("a"), "s", with_memory=True)
    await sh(node, "a", "2", WRITE.format("two", "two"))
    (outcome,) = await node.open(order(scratch, "fork", snapshot_id="s"))
    assert outcome.lease.start == environments_pb2.START_DELTA, outcome
    (outcome,) = await node.open(order(scratch, "paused", snapshot_id="s"))
    await sh(node, "paused", "1", WRITE.format("three", "three"))
    await node.states.pause(node.find("paused"))
    match when:
        case "before a rollback":
            die()
        case "before the machine is replaced":
            snapshots.activate = die  # type: ignore[assignment]
        case "before the former machine ends":
            VmSandbox.close = die  # type: ignore[assignment, method-assign]
        case _:
            folder_snapshots.replace_notes = die  # type: ignore[assignment]
    await node.states.rollback(node.find("a"), "s")


async def succeed(scratch: Path, image: BuiltImage, *, was_put_back: bool) -> None:
    node = node_on(scratch, image)
    await node.driver.start()
    try:
        assert await node.take_over() == (4, 0)
        assert await looked(node, "a", "9") == ("one one" if was_put_back else "two two")
        assert await looked(node, "fork", "9") == "one one"
        # A call that was undone runs again; one that was not is known, and changes nothing.
        await sh(node, "a", "2", WRITE.format("two", "two"))
        assert await looked(node, "a", "10") == "two two"
        await node.states.rollback(node.find("a"), "s")
        assert await looked(node, "a", "10") == "one one"
        assert node.find("paused").is_paused
        await node.resume("paused", "control", ttl_s=600)
        assert await looked(node, "paused", "9") == "three three"
        await node.close(["a", "idle", "fork", "paused"])
    finally:
        await node.driver.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    "when",
    [
        "before a rollback",
        "before the machine is replaced",
        "before the former machine ends",
        "before the notes are replaced",
    ],
)
def test_vms_and_what_was_saved_of_them_outlive_the_host(
    image: BuiltImage, tmp_path: Path, when: str
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "README").write_text("read me\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    killed(lambda: work_and_die(scratch, image, when))
    asyncio.run(succeed(scratch, image, was_put_back=when != "before a rollback"))
