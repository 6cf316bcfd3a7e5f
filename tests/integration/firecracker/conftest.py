"""Machines of Firecracker, over the fake of it: one template for all tests here."""

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.vm.firecracker.install import Make, install

from etude.envserver.drivers.vm import vmm_processes
from etude.envserver.drivers.vm.firecracker.api_requests import FirecrackerConfig
from etude.envserver.drivers.vm.firecracker.driver import FirecrackerDriver
from etude.envserver.drivers.vm.firecracker.jail import FirecrackerPrograms
from etude.envserver.drivers.vm.firecracker.vmm_processes import FirecrackerFolders
from etude.envserver.images.built_image import BuiltImage


@pytest.fixture(scope="session")
def image() -> BuiltImage:
    needs.machines()  # on QEMU the fake runs its guests
    return needs.small_image("qemu")


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> FirecrackerPrograms:
    return install(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def make(image: BuiltImage, programs: FirecrackerPrograms) -> Make:
    def driver(scratch: Path) -> FirecrackerDriver:
        return FirecrackerDriver(
            scratch=scratch,
            images={"python": image},
            machine=FirecrackerConfig(disk_mib=128),
            programs=programs,
        )

    return driver


@pytest.fixture(scope="session")
def booted(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a node left that had nothing but its template."""
    scratch = tmp_path_factory.mktemp("booted")

    async def boot() -> None:
        driver = make(scratch)
        await driver.start()
        await driver.stop()

    asyncio.run(boot())
    return scratch


@pytest.fixture
def scratch(booted: Path, tmp_path: Path) -> Iterator[Path]:
    # Files of a template do not change, and a copy would fill its holes.
    made = shutil.copytree(booted, tmp_path / "scratch", copy_function=os.link)
    yield made
    vmm_processes.kill_processes(FirecrackerFolders(scratch=made).find_processes())
