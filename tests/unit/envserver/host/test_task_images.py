"""Images of tasks on a host: what a failure leaves, and what an order keeps from eviction."""

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from etude.common.pinned_images import PinnedImage
from etude.envserver.drivers.base import ImageSize, SandboxError
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.host import Host
from etude.envserver.host.task_images import (
    ImageNotReadyError,
    TaskImages,
    TaskTemplate,
    WantedImage,
)
from etude.envserver.host.workspace_sources import WorkspaceSource, WorkspaceSources
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage, read_image
from etude.envserver.images.pull.pulled_image import KIND, ImagePuller
from etude.v1 import environments_pb2

DIGESTS = {name: f"sha256:{name * 64}" for name in "abc"}


@dataclass(frozen=True, slots=True)
class ReadyPuller(ImagePuller):
    """Gives an image of one kilobyte at once, from the cache as a pull would."""

    @override
    def pull(self, image: PinnedImage, machine: BuiltImage) -> BuiltImage:
        return read_image(self.cache.entry(KIND, image.digest[7:39], self._make))

    def _make(self, folder: Path) -> None:
        (folder / "root.sqsh").write_bytes(bytes(1024))
        (folder / "manifest.json").write_text(json.dumps({"name": "task", "files": {}}))


@dataclass(slots=True)
class ImageDriver(MemoryDriver):
    """Takes images, unless it is told to refuse them."""

    refuses: bool = False
    templates: set[str] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    rested: list[str] = field(default_factory=list)

    @override
    def template_image(self, template: str) -> BuiltImage:
        return BuiltImage(folder=self.leases, name=template, address="machine", files={})

    @override
    async def add_image(self, name: str, image: BuiltImage) -> ImageSize:
        if self.refuses:
            raise SandboxError("the image cannot be started")
        self.templates.add(name)
        return ImageSize(0, memory=10)

    @override
    async def rest_image(self, address: str) -> None:
        self.rested.append(address)

    @override
    async def remove_image(self, address: str) -> None:
        self.removed.append(address)


@dataclass(slots=True)
class SlowSources(WorkspaceSources):
    """First files that are read while another image arrives."""

    other: "asyncio.Event" = field(default_factory=asyncio.Event)
    arrived: "asyncio.Event" = field(default_factory=asyncio.Event)

    @override
    async def get(self, uri: str, task: TaskTemplate | None = None) -> WorkspaceSource:
        self.other.set()
        await self.arrived.wait()
        return await WorkspaceSources.get(self, uri)


@pytest.fixture
def images(tmp_path: Path) -> TaskImages:
    driver = ImageDriver(tmp_path / "leases")
    driver.leases.mkdir()
    puller = ReadyPuller(cache=BuildCache(tmp_path / "cache"))
    return TaskImages(driver=driver, puller=puller, sources=["ghcr.io/acme"], budget_bytes=1500)


def reference(name: str) -> str:
    return f"ghcr.io/acme/shop@{DIGESTS[name]}"


async def test_an_image_that_cannot_be_started_can_be_evicted(images: TaskImages) -> None:
    assert isinstance(images.driver, ImageDriver)
    images.driver.refuses = True
    with pytest.raises(SandboxError, match="cannot be started"):
        await images.get("python", reference("a"))
    assert images.puller.cache.entries(KIND) != []
    assert images.puller.cache.remove(KIND, DIGESTS["a"][7:39])


async def test_an_order_keeps_its_image_while_its_first_files_are_read(
    images: TaskImages, tmp_path: Path
) -> None:
    assert isinstance(images.driver, ImageDriver)
    sources = SlowSources(tmp_path / "scratch")
    host = Host(driver=images.driver, sources=sources, slots=2, templates={"python"}, images=images)
    kept = await images.get("python", reference("a"))
    request = environments_pb2.OpenEnvironmentsRequest(
        template="python",
        workspace=environments_pb2.WorkspaceSource(uri="empty:"),
        toolset="Standard",
        image=reference("a"),
    )
    opening = asyncio.create_task(host.open(request))
    await sources.other.wait()
    await images.get("python", reference("b"))  # both do not fit into the budget
    assert kept.name in images.driver.templates
    sources.arrived.set()
    assert await opening == []
    await images.get("python", reference("b"))
    await images.close()


async def settle(images: TaskImages) -> None:
    while images.pulled_digests:
        await asyncio.gather(*images._pulling.values(), return_exceptions=True)
        await asyncio.sleep(0)


async def test_planned_images_are_pulled_in_their_order_and_go_last(images: TaskImages) -> None:
    await images.get("python", reference("a"))
    size = next(iter(images._kept.values())).num_bytes
    images.budget_bytes = 2 * size + size // 2
    images.want([WantedImage("python", reference("a")), WantedImage("python", reference("b"))])
    await settle(images)
    assert images.digests == [DIGESTS["a"], DIGESTS["b"]]
    # No room for one more beside the planned ones: the third is not pulled ahead of its turn.
    images.want(WantedImage("python", reference(name)) for name in "abc")
    assert images.pulled_digests == []
    # An order that needs it has it, and the planned image that is needed last goes.
    await images.get("python", reference("c"))
    assert images.digests == [DIGESTS["a"], DIGESTS["c"]]
    await images.close()


async def test_a_planned_image_that_tasks_may_not_name_is_not_pulled(images: TaskImages) -> None:
    evil = f"evil.io/acme/shop@{DIGESTS['a']}"
    images.want([WantedImage("python", evil), WantedImage("python", "no reference")])
    assert images.pulled_digests == []


async def test_what_an_earlier_process_left_goes_first(images: TaskImages, tmp_path: Path) -> None:
    assert isinstance(images.driver, ImageDriver)
    left = await images.get("python", reference("a"))
    address = images._kept[left.name].built.address
    os.close(images._kept.pop(left.name).held)
    await images.get("python", reference("b"))
    images.budget_bytes = 1
    await images.get("python", reference("c"))
    assert address in images.driver.removed
    assert images.digests == [DIGESTS["c"]]


async def test_an_image_of_two_templates_stays_while_one_of_them_is_used(
    images: TaskImages,
) -> None:
    for template in ("python", "node"):
        await images.get(template, reference("a"))
    images.budget_bytes = 1
    images.in_use = lambda: [f"node@{DIGESTS['a']}"]
    await images.get("python", reference("b"))
    assert DIGESTS["a"] in images.digests
    images.in_use = tuple
    await images.get("python", reference("c"))
    assert images.digests == [DIGESTS["c"]]


async def test_templates_beyond_the_memory_rest_on_the_disk_until_they_are_needed(
    images: TaskImages,
) -> None:
    assert isinstance(images.driver, ImageDriver)
    images.budget_bytes, images.memory_bytes = 1 << 30, 20
    for name in "abc":
        await images.get("python", reference(name))
    assert images.digests == [DIGESTS[name] for name in "abc"]
    assert images.driver.rested == [DIGESTS["a"][7:39]]
    # An order for it is repeated while it loads; one that a lease uses stays.
    images.in_use = lambda: [f"python@{DIGESTS['b']}"]
    with pytest.raises(ImageNotReadyError):
        images.find("python", reference("a"))
    await settle(images)
    assert images.find("python", reference("a")).image == reference("a")
    assert images.driver.rested[1:] == [DIGESTS["c"][7:39]]
    assert images.driver.removed == []
