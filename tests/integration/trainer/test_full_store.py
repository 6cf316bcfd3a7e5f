"""A publisher whose store is really full: a tmpfs with room for half of what it uploads."""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.trainer_simulation.workers import SimulatedLearners
from typing_extensions import override

from etude.cli.weights.verification import verify
from etude.common import weights
from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import Store, open_store
from etude.common.store_retry import StoreRetry
from etude.common.weights import VersionId
from etude.common.weights.protocol.listing import take_listing
from etude.trainer.controller.publishing.versions import VersionChain
from etude.trainer.export.receipts import PublishBase, RankReceipt
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

MODEL = Path(__file__).parents[2] / "data" / "tiny-model"
DISK = 'mount -t tmpfs -o size=2m tmpfs "$1" && shift && exec "$@"'
PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 9,
    "optimizer": {"learningRate": "1e-2"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}


class OneRank(SimulatedLearners):
    """A real learner where the controller sees its ranks; it only publishes."""

    learner: Learner

    @override
    async def encode(self, version: VersionId, base: PublishBase | None) -> list[RankReceipt]:
        return [await asyncio.to_thread(self.learner.encode, version, base)]

    @override
    async def upload(self, version: VersionId) -> None:
        await asyncio.to_thread(self.learner.upload, version)


def text() -> list[SupervisedSequence]:
    ids = np.arange(24, dtype=np.int32)
    return [SupervisedSequence(token_ids=ids, weights=np.ones(24, np.float32))]


def fill(ballast: Path, *, but_bytes: int) -> None:
    """Leave so much room on the disk."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with ballast.open("r+b") as file:
        file.truncate(ballast.stat().st_size - but_bytes)


def payloads(store: Store, version: VersionId) -> list[str]:
    return [info.key for info in take_listing(store).payloads.get(version, [])]


async def publish_into_a_full_store(folder: Path, scratch: Path) -> None:
    """Publish, fill the store, publish, make room; print what was said and what was there."""
    storage = Storage(uri=(folder / "run").as_uri())
    store = open_store(storage.uri)
    weights.claim_epoch(store, holder="a", parent=None, reason="start")
    ranks = OneRank(store)
    ranks.learner = Learner(
        LearnerConfig(
            run="run",
            holder="a",
            model_folder=MODEL,
            storage=storage,
            weights=Weights(encoding="Full"),
        )
    )
    ranks.learner.start_phase(PHASE, 0)
    versions, patience = (
        VersionChain(store=store, run_uid="run", holder="a"),
        StoreRetry(limit_s=60),
    )
    first, second = VersionId(1, 0), VersionId(1, 1)
    found = await versions.encode(ranks, first, step=0, store_retry=patience)
    await versions.upload_and_publish(ranks, found, store_retry=patience)
    ranks.learner.supervised_step(text())
    fill(folder / "ballast", but_bytes=found.objects[0].size // 2)
    refused = await versions.encode(ranks, second, step=1, store_retry=patience)
    publishing = asyncio.create_task(
        versions.upload_and_publish(ranks, refused, store_retry=patience)
    )
    async with asyncio.timeout(60):
        while not (trouble := patience.problem):  # noqa: ASYNC110 - a plain field
            await asyncio.sleep(0.01)
    listed = payloads(store, second)
    files = [str(file) for file in (folder / "run").rglob(f"{second.number:012d}/*")]
    chain = [str(version) for version in weights.accepted_chain(store)]
    (folder / "ballast").unlink()
    await publishing
    problems = [verdict.problem for verdict in verify(store, scratch)]
    after = [len(payloads(store, second)), patience.problem, problems]
    sys.stdout.write(json.dumps([trouble, listed, files, chain, *after]))


@pytest.mark.long
def test_a_full_store_is_said_in_its_words_and_publishing_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    disk, scratch = tmp_path / "disk", tmp_path / "scratch"
    disk.mkdir()
    inside = (sys.executable, str(Path(__file__)), str(disk), str(scratch))
    own_mounts = ("unshare", "--user", "--map-root-user", "--mount")
    if subprocess.run((*own_mounts, "true"), check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run(
        (*own_mounts, "sh", "-c", DISK, "sh", str(disk), *inside),
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    trouble, listed, files, chain, count, left, problems = json.loads(done.stdout)
    assert "No space left on device" in trouble
    assert "weights/deltas/000001/000000000001/" in trouble
    assert (listed, files) == ([], []), "nothing of what was uploaded is left"
    assert chain == ["1.0"]
    assert (count, left) == (1, "")
    assert problems == ["", ""]


if __name__ == "__main__":
    asyncio.run(publish_into_a_full_store(Path(sys.argv[1]), Path(sys.argv[2])))
