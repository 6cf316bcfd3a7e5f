"""A driver of gVisor for all tests here, or the reason why this machine has none."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import microvms

from etude.common.errors import UserError
from etude.envserver import folders
from etude.envserver.drivers.gvisor import runsc
from etude.envserver.drivers.gvisor.driver import GvisorDriver
from etude.envserver.drivers.gvisor.runsc import RunscError
from etude.envserver.images.build import Image


def skip(why: str) -> None:
    if os.environ.get("ETUDE_REQUIRE") == "gvisor":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def image() -> Image:
    if os.geteuid() != 0:
        skip("containers of gVisor and roots of images need root")
    try:
        asyncio.run(runsc.version())
        return microvms.small_image()
    except (RunscError, RuntimeError, UserError) as error:
        skip(str(error))
        raise


@pytest.fixture(scope="session")
def started(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GvisorDriver]:
    scratch = tmp_path_factory.mktemp("gvisor")
    made = GvisorDriver(scratch=scratch, images={"small": image}, memory_mib=256)
    asyncio.run(made.start())
    yield made
    asyncio.run(ended(made))


async def ended(driver: GvisorDriver) -> None:
    """Take every container along: a driver that stops leaves those of leases."""
    await driver.stop()
    for name in await driver._runsc.containers():
        await driver._runsc.end(name)


@pytest.fixture
def driver(started: GvisorDriver) -> Iterator[GvisorDriver]:
    started._places = asyncio.Semaphore(2)
    yield started
    for folder in started.leases.iterdir():
        folders.remove(folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir(mode=0o700)
    return folder
