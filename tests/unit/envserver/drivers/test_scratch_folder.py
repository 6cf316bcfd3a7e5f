"""One daemon to a scratch folder."""

import asyncio
import os
from pathlib import Path

import pytest

from etude.envserver.drivers import scratch_folder
from etude.envserver.drivers.base import DriverUnavailableError


async def test_a_folder_that_somebody_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_folder, "LOCK_LIMIT_S", 0.0)
    mine = await scratch_folder.lock_scratch(tmp_path)
    with pytest.raises(DriverUnavailableError, match="another node daemon") as caught:
        await scratch_folder.lock_scratch(tmp_path)
    assert caught.value.problem.where == str(tmp_path)
    os.close(mine)


async def test_a_daemon_waits_for_one_that_is_about_to_end(tmp_path: Path) -> None:
    former = await scratch_folder.lock_scratch(tmp_path)
    waiting = asyncio.create_task(scratch_folder.lock_scratch(tmp_path), name="successor")
    await asyncio.sleep(0)
    assert not waiting.done()
    os.close(former)
    os.close(await waiting)
