"""The journal on a disk that is really full: a tmpfs of a few hundred kilobytes."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from etude.common.blobs import open_store
from etude.common.weights import claim_epoch
from etude.trainer.controller.journal import write_ahead_log
from etude.trainer.controller.journal.write_ahead_log import Journal
from etude.v1.journal_pb2 import JournalAdmit, JournalOpen, JournalRecord

DISK = 'mount -t tmpfs -o size=512k tmpfs "$1" && shift && exec "$@"'
BALLAST_BYTES = 200 * 1024
RECORD_BYTES = 16 * 1024


async def fill_and_make_room(folder: Path) -> None:
    """Write until the disk is full, then make room; print what was promised and what is there."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(BALLAST_BYTES))
    store = open_store((folder / "run").as_uri())
    claim_epoch(store, holder="a", parent=None, reason="start")
    log = Journal(store, "run", 1, 1)
    log.append(JournalRecord(open=JournalOpen(run_uid="run", epoch=1)))
    acknowledged = 0
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(log.run())
        while not (trouble := log.store_retry.problem):
            sequence = log.append(JournalRecord(admit=JournalAdmit(task_id="x" * RECORD_BYTES)))
            waiting = tasks.create_task(log.wait_durable(sequence))
            while not waiting.done() and not log.store_retry.problem:  # noqa: ASYNC110 - a plain field
                await asyncio.sleep(0.01)
            acknowledged = sequence if waiting.done() else acknowledged
        ballast.unlink()
        await log.wait_durable()
        writing.cancel()
    found = write_ahead_log.recover_records(store, run_uid="run", before_epoch=2, since=0)
    there = [record.sequence for record in found.records]
    sys.stdout.write(json.dumps([trouble, acknowledged, log.last_sequence, there]))


def test_what_was_acknowledged_outlives_a_full_disk_and_writing_goes_on(tmp_path: Path) -> None:
    inside = (sys.executable, str(Path(__file__)), str(tmp_path))
    own_mounts = ("unshare", "--user", "--map-root-user", "--mount")
    if subprocess.run((*own_mounts, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run(
        (*own_mounts, "sh", "-c", DISK, "sh", str(tmp_path), *inside),
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    trouble, acknowledged, last, there = json.loads(done.stdout)
    assert "No space left on device" in trouble
    assert 0 < acknowledged < last
    assert there == list(range(1, last + 1)), "each record once, in order, none torn"


if __name__ == "__main__":
    asyncio.run(fill_and_make_room(Path(sys.argv[1])))
