"""Snapshots under way at the same time leave the disk's reserve alone, and the loop to others."""

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.envserver.drivers.base import SavedSandbox
from etude.envserver.host.leases.records import CALLS
from etude.envserver.host.snapshots import local_snapshots
from etude.envserver.host.snapshots.local_snapshots import (
    LocalSnapshots,
    NoRoomError,
    SnapshotQuota,
)
from etude.envserver.host.snapshots.snapshot_record import SnapshotOrigin
from etude.envserver.storage import folders
from etude.envserver.storage.folders import FolderLimits

MIB = 1 << 20
ORIGIN = SnapshotOrigin("run", "lease", "python", "file:///x", "key")


@pytest.fixture
def kept(tmp_path: Path) -> LocalSnapshots:
    return LocalSnapshots(tmp_path / "snapshots", SnapshotQuota(reserve_bytes=100 * MIB))


def disk(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    said = SimpleNamespace(f_bavail=free_bytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _folder: said)


async def test_all_that_are_under_way_together_fit_beside_the_reserve(
    kept: LocalSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 164 * MIB)
    granted: list[int] = []
    begun, end = asyncio.Semaphore(0), asyncio.Event()

    async def write(folder: Path, limits: FolderLimits) -> SavedSandbox:
        granted.append(limits.max_bytes)
        (folder / CALLS).touch()
        begun.release()
        await end.wait()
        return SavedSandbox(num_bytes=1, digest="")

    takes = [
        asyncio.create_task(kept.take(str(number), ORIGIN, write, has_memory=False))
        for number in range(5)
    ]
    for _ in takes:
        await begun.acquire()
    assert granted == [32 * MIB, 16 * MIB, 8 * MIB, 4 * MIB, 2 * MIB]
    end.set()
    await asyncio.gather(*takes)

    granted.clear()
    await kept.take("later", ORIGIN, write, has_memory=False)
    assert granted == [32 * MIB]  # those that have come to their end write no more


async def test_a_disk_with_nothing_but_its_reserve_takes_none(
    kept: LocalSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, 100 * MIB)

    async def write(_folder: Path, _limits: FolderLimits) -> SavedSandbox:
        raise AssertionError("nothing is to be written")

    with pytest.raises(NoRoomError, match="last 100 MiB"):
        await kept.take("s", ORIGIN, write, has_memory=False)


async def test_what_was_dropped_while_it_was_read_is_removed_beside_the_loop(
    kept: LocalSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(folder: Path, _limits: FolderLimits) -> SavedSandbox:
        (folder / CALLS).touch()
        return SavedSandbox(num_bytes=1, digest="")

    made = await kept.take("s", ORIGIN, write, has_memory=False)
    removers: list[threading.Thread] = []

    def remove(folder: Path) -> None:
        removers.append(threading.current_thread())
        folders.remove_folder(folder)

    monkeypatch.setattr(local_snapshots, "_remove_or_log", remove)
    async with kept.using(made) as folder:
        await kept.drop(made)
        assert folder.exists()

    assert not made.folder.exists()
    assert threading.main_thread() not in removers
