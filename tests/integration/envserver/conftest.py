"""A real process driver, or the reason why this machine refuses one."""

import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.process import ProcessDriver

MakeWorkspace = Callable[[ProcessDriver, str, Mapping[str, bytes]], Path]


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[ProcessDriver]:
    made = ProcessDriver(tmp_path / "scratch")
    (tmp_path / "scratch").mkdir()
    try:
        await made.start()
    except DriverUnavailableError as error:
        if os.environ.get("ETUDE_REQUIRE") == "sandbox":
            raise
        pytest.skip(str(error))
    yield made
    await made.stop()


@pytest.fixture
def make_workspace() -> MakeWorkspace:
    def make(driver: ProcessDriver, name: str, files: Mapping[str, bytes]) -> Path:
        folder = driver.leases / name / "workspace"
        folder.mkdir(parents=True)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        for entry in (folder, *folder.rglob("*")):
            shutil.chown(entry, *driver.owner())
        return folder

    return make
