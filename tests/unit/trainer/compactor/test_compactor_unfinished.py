"""Halves of files that killed writers left in a folder are deleted once they are old."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from etude.common.blobs import MemoryStore, open_store
from etude.common.errors import StoreError
from etude.common.weights.protocol.retention import ORPHAN_S
from etude.trainer.compactor.compactor import delete_unfinished_uploads

MakeCompactor = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A name that a URL cannot say as it is."""
    return tmp_path / "a run #1"


def aged(file: Path, *, by_s: float) -> None:
    then = file.stat().st_mtime - by_s
    os.utime(file, (then, then))


def test_a_compactor_deletes_what_nobody_writes_any_more(
    trained: Any, keep: MakeCompactor, folder: Path
) -> None:
    store = open_store(f"file://{quote(str(folder))}")
    policy = type(trained)(store)
    policy.open()
    policy.publish(0)
    [whole] = (folder / "weights" / "deltas").rglob("*.kf")
    left = whole.with_name(whole.name + "#1")
    left.write_bytes(whole.read_bytes()[:100])
    under_way = whole.with_name(whole.name + "#22")
    under_way.write_bytes(b"half")
    compactor = keep(store)
    assert compactor.run_round().failures == ()
    assert left.exists()
    aged(left, by_s=2 * ORPHAN_S)
    policy.publish(1)
    assert compactor.run_round().failures == ()
    assert not left.exists()
    assert under_way.exists()
    assert whole.exists()


def test_no_object_can_be_taken_for_a_half(folder: Path) -> None:
    store = open_store(f"file://{quote(str(folder))}")
    with pytest.raises(StoreError, match="not supported"):
        store.put("journal/a#1", b"whole")


def test_a_store_that_is_no_folder_is_left_alone() -> None:
    assert delete_unfinished_uploads(MemoryStore().url, older_than_s=0.0) == []
    assert delete_unfinished_uploads("s3://bucket/run", older_than_s=0.0) == []
