"""A driver of gVisor for all tests here, or the reason why this machine has none."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.vm import gvisors

from etude.envserver.drivers.gvisor.driver import GvisorDriver
from etude.envserver.images.built_image import BuiltImage
from etude.envserver.storage import folders


@pytest.fixture(scope="session")
def image() -> BuiltImage:
    needs.containers()
    return needs.small_image("gvisor", "qemu")


@pytest.fixture(scope="session")
def started(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GvisorDriver]:
    scratch = tmp_path_factory.mktemp("gvisor")
    made = GvisorDriver(scratch=scratch, images={"small": image}, memory_mib=256)
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())
    gvisors.end_all(scratch)


@pytest.fixture
def driver(started: GvisorDriver) -> Iterator[GvisorDriver]:
    started._slots = asyncio.Semaphore(2)
    yield started
    for folder in started.leases.iterdir():
        folders.remove_folder(folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir(mode=0o700)
    return folder
