"""Leases of microVMs whose tasks name an image by digest: booted once for each image."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.environments import killed_hosts
from tests.support.environments.image_leases import opened_at_last, says, write_image
from tests.support.vm import guests, microvms

from etude.envserver.drivers.vm import vmm_processes
from etude.envserver.drivers.vm.qemu.driver import QemuDriver
from etude.envserver.host.host import Host
from etude.envserver.host.task_images import TaskImages
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.images.pull.pulled_image import ImagePuller


class Node:
    """Hosts that follow each other in one folder."""

    def __init__(self, image: BuiltImage, folder: Path) -> None:
        self.image, self.folder = image, folder
        self.driver: QemuDriver
        self.host: Host

    async def start(self) -> tuple[int, int]:
        """Start a host; returns the leases that it adopts, and the folders that it removes."""
        self.driver = QemuDriver(
            scratch=self.folder / "scratch",
            images={"small": self.image},
            machine=microvms.small_machine(),
        )
        await self.driver.start()
        images = TaskImages(
            driver=self.driver,
            puller=ImagePuller(cache=BuildCache(self.folder / "cache")),
            sources=[(self.folder / "layouts").as_uri()],
            budget_bytes=1 << 30,
        )
        self.host = Host(
            driver=self.driver,
            sources=WorkspaceSources(self.folder),
            slots=8,
            templates={"small"},
            images=images,
        )
        self.host.endpoint = "127.0.0.1:1"
        return await self.host.take_over()

    async def stop(self) -> None:
        """End the process's part, and leave the environments."""
        assert self.host.images is not None
        await self.host.images.close()
        await self.driver.stop()

    @property
    def booted(self) -> int:
        """Templates that this process booted."""
        return len(self.driver._fresh)


@pytest.fixture
async def node(image: BuiltImage, tmp_path: Path) -> AsyncIterator[Node]:
    needs.image_programs()
    made = Node(image, tmp_path)
    await made.start()
    yield made
    await made.host.close([each.lease.lease_id for each in made.host.held_leases()])
    await made.stop()
    vmm_processes.kill_processes(vmm_processes.find_marked_processes(tmp_path))


def test_an_image_boots_once_and_its_leases_outlive_a_killed_host(
    image: BuiltImage, tmp_path: Path
) -> None:
    needs.image_programs()
    one = write_image(tmp_path / "layouts/one", "one", User="builder")

    async def work() -> None:
        node = Node(image, tmp_path)
        await node.start()
        await opened_at_last(node.host, "a", one)
        assert (await says(node.host, "a", "readlink /workspace")).startswith("/app")
        await opened_at_last(node.host, "b", one)
        assert (await says(node.host, "b", "cat /etc/word; id -u")).startswith("one")
        assert node.booted == 2, "the template of the pool, and that of the image"
        await says(node.host, "a", "echo fixed > shop.txt; echo in memory > /tmp/mine")
        killed_hosts.die()

    async def follow() -> None:
        node = Node(image, tmp_path)
        assert await node.start() == (2, 0)
        found = await says(node.host, "a", "cat shop.txt /tmp/mine /etc/word; say $WORD:$USER")
        assert "of the image:builder" in found
        assert "fixed\nin memory\none" in found
        assert (await says(node.host, "b", "cat shop.txt")).startswith("broken")
        await opened_at_last(node.host, "c", one)
        assert (await says(node.host, "c", "cat /etc/word")).startswith("one")
        assert node.booted == 0, "both templates were cached"
        await node.host.close(["a", "b", "c"])
        await node.stop()

    try:
        killed_hosts.killed(work)
        asyncio.run(follow())
    finally:
        vmm_processes.kill_processes(vmm_processes.find_marked_processes(tmp_path))


async def test_an_image_that_is_evicted_takes_its_template_along(
    node: Node, tmp_path: Path
) -> None:
    images = node.host.images
    assert images is not None
    templates = node.folder / "scratch/templates"
    one, two = (write_image(tmp_path / "layouts" / name, name) for name in ("one", "two"))
    await opened_at_last(node.host, "a", one)
    await node.host.close(["a"])
    assert len(list(templates.iterdir())) == 2
    images.budget_bytes = 1
    await opened_at_last(node.host, "b", two)
    await guests.until(lambda: not images.pulled_digests)
    assert images.digests == [two.rpartition("@")[2]]
    assert len(list(templates.iterdir())) == 2
    assert (await says(node.host, "b", "cat /etc/word")).startswith("two")

    # A successor that is given less disk removes what it finds, too.
    await node.host.close(["b"])
    await node.stop()
    await node.start()
    assert len(list(templates.iterdir())) == 2
    successor = node.host.images
    assert successor is not None
    successor.budget_bytes = 1
    await opened_at_last(node.host, "c", one)
    await guests.until(lambda: not successor.pulled_digests)
    assert len(list(templates.iterdir())) == 2
    await node.host.close(["c"])
