"""Accesses of commands, as driver Process reports them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from etude.envserver.drivers.accesses import AccessKind, AccessReport
from etude.envserver.drivers.base import DriverUnavailableError
from etude.envserver.drivers.folder_driver import FolderCommand
from etude.envserver.drivers.process import access_log
from etude.envserver.drivers.process.driver import ProcessDriver
from etude.envserver.storage import folders
from etude.envserver.storage.trees import File

TREE = {
    "shop.py": File(b"x = 1\n"),
    "tests/test_shop.py": File(b"def test(): ...\n"),
    ".git/logs/HEAD": File(b"more\n"),
}


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[ProcessDriver]:
    made = ProcessDriver(scratch=tmp_path)
    try:
        await made.start()
    except DriverUnavailableError as error:
        pytest.skip(str(error))
    yield made
    await made.stop()


async def accesses(driver: ProcessDriver, command: str) -> AccessReport:
    workspace = driver.leases / "lease" / "workspace"
    workspace.parent.mkdir()
    folders.write_tree(workspace, TREE, driver.owner())
    done = await driver.run(FolderCommand(command=command, workspace=workspace, timeout_s=20))
    return done.accesses


async def test_writes_deletions_and_telling_reads_are_reported(driver: ProcessDriver) -> None:
    command = (
        "cat .git/logs/HEAD shop.py; echo 2 >> shop.py; rm tests/test_shop.py;"
        " mkdir -p new/deep; sleep 0.3; echo 1 > new/deep/file; echo 1 > /logs/note"
    )
    found = await accesses(driver, command)
    seen = {(each.kind, each.path) for each in found.accesses}
    assert {
        (AccessKind.READ, "/workspace/.git/logs/HEAD"),
        (AccessKind.WRITTEN, "/workspace/shop.py"),
        (AccessKind.DELETED, "/workspace/tests/test_shop.py"),
        (AccessKind.WRITTEN, "/workspace/new/deep/file"),
        (AccessKind.WRITTEN, "/logs/note"),
        (AccessKind.STARTED, "sleep"),
    } <= seen
    assert (AccessKind.READ, "/workspace/shop.py") not in seen
    assert found.is_complete


async def test_a_command_that_floods_the_log_is_bounded_and_incomplete(
    driver: ProcessDriver,
) -> None:
    found = await accesses(driver, "i=0; while [ $i -lt 600 ]; do : > file$i; i=$((i+1)); done")
    assert len(found.accesses) == access_log.MAX_ACCESSES
    assert not found.is_complete


async def test_names_that_grow_when_encoded_do_not_break_the_report(driver: ProcessDriver) -> None:
    name = "\N{PILE OF POO}" * 60
    command = f"i=0; while [ $i -lt 250 ]; do : > $i{name}; i=$((i+1)); done"
    found = await accesses(driver, command)
    assert 0 < len(found.accesses) < 250
    assert not found.is_complete
