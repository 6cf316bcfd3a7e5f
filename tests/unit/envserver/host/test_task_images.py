"""Images of tasks on a host: what a failure leaves, and what an order keeps from eviction."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typing_extensions import override

from etude.common.pinned_images import PinnedImage
from etude.envserver.drivers.base import SandboxError
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.host import Host
from etude.envserver.host.task_images import TaskImages, TaskTemplate
from etude.envserver.host.workspace_sources import WorkspaceSource, WorkspaceSources
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.built_image import BuiltImage, read_image
from etude.envserver.images.pull.pulled_image import KIND, ImagePuller
from etude.v1 import environments_pb2

DIGESTS = {name: f"sha256:{name * 64}" for name in "ab"}


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

    @override
    def template_image(self, template: str) -> BuiltImage:
        return BuiltImage(folder=self.leases, name=template, address="machine", files={})

    @override
    async def add_image(self, name: str, image: BuiltImage) -> int:
        if self.refuses:
            raise SandboxError("the image cannot be started")
        self.templates.add(name)
        return 0

    @override
    async def remove_image(self, name: str, image: BuiltImage) -> None:
        self.templates.remove(name)


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
