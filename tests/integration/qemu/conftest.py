"""One sealed template for all tests here, or the reason why this machine makes none."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support import needs
from tests.support.vm import microvms
from tests.support.vm.microvms import Lab

from etude.envserver.drivers.vm.qemu.template import QemuTemplate
from etude.envserver.images.built_image import BuiltImage


@pytest.fixture(scope="session")
def image() -> BuiltImage:
    needs.machines()
    return needs.small_image("qemu")


@pytest.fixture(scope="session")
def template(image: BuiltImage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QemuTemplate]:
    folder = tmp_path_factory.mktemp("template")
    made = asyncio.run(microvms.booted(image, microvms.small_machine(), folder))
    yield made
    made.close()


@pytest.fixture
async def lab(template: QemuTemplate, tmp_path: Path) -> AsyncIterator[Lab]:
    made = Lab(template, tmp_path)
    yield made
    await made.close()
