"""One sealed template for all tests here, or the reason why this machine makes none."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support import microvms
from tests.support.microvms import Lab

from etude.common.errors import UserError
from etude.envserver.drivers.qemu.machine import PROGRAM
from etude.envserver.drivers.qemu.template import Template
from etude.envserver.images.build import Image


def skip(why: str) -> None:
    if os.environ.get("ETUDE_REQUIRE") == "qemu":
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def image() -> Image:
    if shutil.which(PROGRAM) is None:
        skip(f"{PROGRAM} is not installed: `make system-deps` installs it")
    if os.geteuid() != 0:
        skip("jails of machines and roots of images need root")
    try:
        return microvms.small_image()
    except (RuntimeError, UserError) as error:
        skip(f"no image: {error}")
        raise


@pytest.fixture(scope="session")
def template(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    folder = tmp_path_factory.mktemp("template")
    made = asyncio.run(microvms.booted(image, microvms.small_machine(), folder))
    yield made
    made.close()


@pytest.fixture
async def lab(template: Template, tmp_path: Path) -> AsyncIterator[Lab]:
    made = Lab(template, tmp_path)
    yield made
    await made.close()
