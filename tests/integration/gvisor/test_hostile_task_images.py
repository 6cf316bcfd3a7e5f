"""Hostile images and registries at a host that works: no one of them gets anywhere, nor disturbs.

tests/integration/images looks at each by itself; here all come at once, beside an honest task.
"""

import asyncio
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support import figures, needs, oci_layouts, registries
from tests.support.environments.image_leases import says, settled, write_image
from tests.support.oci_layouts import Member, device, file, link
from tests.support.registries import Registry

from etude.envserver.drivers.gvisor.driver import GvisorDriver
from etude.envserver.host.host import Host
from etude.envserver.host.task_images import TaskImages
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.envserver.images.build_cache import BuildCache
from etude.envserver.images.pull.bounded_program import FillLimits
from etude.envserver.images.pull.pulled_image import ImagePuller
from etude.envserver.images.pull.registry_access import RegistryAccess


def limits() -> FillLimits:
    return FillLimits(max_bytes=24 << 20, max_entries=2_000, timeout_s=30, stall_s=3)


@dataclass(frozen=True, slots=True)
class World:
    """A host, and where its images come from."""

    host: Host
    layouts: Path
    registry: Registry
    folder: Path

    def reference(self, *layers: list[Member], name: str = "hostile") -> str:
        digest = oci_layouts.write_layout(self.layouts / name, *layers)
        return f"{(self.layouts / name).as_uri()}@{digest}"

    def of_registry(self, digest: str = "", host: str = "") -> str:
        return f"{host or self.registry.host}/acme/shop@{digest or self.registry.tags['v1']}"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    needs.image_programs()
    image = write_image(tmp_path / "served", "served")
    made = Registry(tmp_path / "served", tags={"v1": image.rpartition("@")[2]})
    with registries.serving(made) as served:
        yield served


@pytest.fixture
async def world(driver: GvisorDriver, registry: Registry, tmp_path: Path) -> AsyncIterator[World]:
    down = "127.0.0.1:9"
    puller = ImagePuller(
        cache=BuildCache(tmp_path / "cache"),
        registries=RegistryAccess(insecure=frozenset({registry.host, down})),
        limits=limits(),
    )
    sources = [(tmp_path / "layouts").as_uri(), registry.host, down]
    images = TaskImages(driver=driver, puller=puller, sources=sources, budget_bytes=1 << 30)
    host = Host(
        driver=driver,
        sources=WorkspaceSources(tmp_path),
        slots=32,
        templates={"small"},
        images=images,
    )
    host.endpoint = "127.0.0.1:1"
    yield World(host, tmp_path / "layouts", registry, tmp_path)
    await host.close([each.lease.lease_id for each in host.held_leases()])
    await images.close()


def refused(world: World) -> Mapping[str, str]:
    """Images that no environment may begin with."""
    lying = world.reference([file("a")], name="lying")
    blob = world.layouts / "lying/blobs/sha256" / lying.rpartition(":")[2]
    blob.write_bytes(blob.read_bytes() + b" ")
    manifest = world.registry.tags["v1"]
    forged = write_image(world.registry.layout, "forged").rpartition("@")[2]
    world.registry.forged[forged] = b"{}"
    return {
        "a digest that lies": lying,
        "many files": world.reference([file(f"many/{n}", b"") for n in range(4_000)], name="many"),
        "a layer that swells": world.reference(
            [file(f"zeros/{n}", bytes(4 << 20)) for n in range(12)], name="swells"
        ),
        "one file that swells": world.reference([file("zeros", bytes(64 << 20))], name="file"),
        "deep folders": world.reference([file("a/" * 1_500 + "leaf")], name="deep"),
        "a system that leads to the host": world.reference(
            [link("usr", "/usr"), file("app/a")], name="leads"
        ),
        "a registry that has another content": world.of_registry(forged),
        "a registry that lacks it": world.of_registry(f"sha256:{'2' * 64}"),
        "a registry that is down": world.of_registry(manifest, "127.0.0.1:9"),
        "another source": f"127.0.0.1:10/acme/shop@{manifest}",
    }


async def test_hostile_images_fail_their_own_leases_alone(world: World) -> None:
    images = refused(world)
    good = write_image(world.layouts / "good", "good")
    orders = {
        name: settled(world.host, f"h{n}", ref) for n, (name, ref) in enumerate(images.items())
    }
    *outcomes, honest = await asyncio.gather(*orders.values(), settled(world.host, "good", good))
    begun = [
        name
        for name, outcome in zip(orders, outcomes, strict=True)
        if outcome.failure.reason not in {"ImageUnavailable", "InvalidArgument"}
    ]
    figures.record("images", hostile_images=len(images), hostile_begun=len(begun))
    assert begun == []
    assert honest.HasField("lease"), honest.failure.message
    assert (await says(world.host, "good", "cat /etc/word")).startswith("good")
    assert len(world.host.held_leases()) == 1, "a failed image holds no slot"
    assert not list((world.folder / "cache/partial").iterdir())


async def test_a_registry_that_stalls_holds_up_no_other(world: World) -> None:
    stalling = world.of_registry()
    world.registry.stalls.add(world.registry.tags["v1"])
    waiting = asyncio.create_task(settled(world.host, "slow", stalling))
    good = write_image(world.layouts / "good", "good")
    honest = await settled(world.host, "good", good)
    assert honest.HasField("lease"), honest.failure.message
    assert (await waiting).failure.reason == "ImageUnavailable"


async def test_what_layers_try_stays_in_the_environment(world: World) -> None:
    secret = world.folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    tries: list[list[Member]] = [
        [
            *(file("/../../evil"), file("/evil"), device("dev/mem")),
            *(file("opt/su", b"#!/bin/sh\nid -u\n", mode=0o6755), link("out", str(world.folder))),
        ],
        [link("mine", str(secret), is_hard=False), link("hard", "mine", is_hard=True)],
        [file("out/evil")],
    ]
    image = _with_shell(world, tries)
    outcome = await settled(world.host, "a", image)
    assert outcome.HasField("lease"), outcome.failure.message
    told = await says(world.host, "a", "/opt/su; cat /mine /hard; ls /dev/mem; cat /evil | wc -c")
    assert told.split("\n")[0] == "1000"
    assert "secret\n" not in told
    assert "/dev/mem\n" not in told.replace("'/dev/mem'", "")
    found = secret.stat()
    assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (1, 0o600)
    assert "evil" not in names(Path("/"), world.folder)


def names(*folders: Path) -> set[str]:
    return {path.name for folder in folders for path in folder.iterdir()}


def _with_shell(world: World, tries: list[list[Member]]) -> str:
    """The layers above an image that has a shell."""
    return write_image(world.layouts / "tries", "tries", layers=tries)
