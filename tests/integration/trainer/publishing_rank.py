"""One learner rank in its own process: publishes its shards, and exports what they add up to."""

import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from etude.common.api.run.weights import Weights
from etude.common.api.storage import Storage
from etude.common.blobs import open_store
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.trainer.export.receipts import PublishBase, RankReceipt, build_manifest
from etude.trainer.learner.batches import SupervisedSequence
from etude.trainer.learner.config import LearnerConfig
from etude.trainer.learner.learner import Learner

PHASE = {
    "name": "sft",
    "type": "SupervisedFineTuning",
    "maxSteps": 9,
    "optimizer": {"learningRate": "2e-6"},
    "data": [{"name": "traces", "uri": "file:///traces.jsonl"}],
}
VERSIONS = 4
RUN_UID = "uid-tiny"


def texts(seed: int) -> list[SupervisedSequence]:
    ids = np.random.default_rng(seed).integers(0, 64, (4, 12)).astype(np.int32)
    return [SupervisedSequence(token_ids=row, weights=np.ones(12, np.float32)) for row in ids]


class Controller:
    """As it would be on every rank alike; the first one commits."""

    def __init__(self, learner: Learner, folder: Path, *, rank: int) -> None:
        self.learner = learner
        self.store = open_store(f"file://{folder}")
        self.rank = rank
        self.base: PublishBase | None = None

    def publish(self, number: int, epoch: int = 1) -> None:
        version = VersionId(epoch, number)
        receipt = self.learner.encode(version, self.base)
        self.learner.upload(version)
        receipts: list[RankReceipt] = [receipt, receipt]
        dist.all_gather_object(receipts, receipt)
        manifest = build_manifest(
            receipts,
            run=RUN_UID,
            version=version,
            step=number,
            holder="test",
            base=self.base.ref if self.base else None,
        )
        if self.rank == 0:
            publication.publish_manifest(self.store, manifest)
        self.base = PublishBase(manifest.ref, manifest.schema_sha256)
        self.learner.export(f"export-{number}")
        dist.barrier()


def main(rank: int, folder: Path, expert: int) -> None:
    learner = Learner(
        LearnerConfig(
            run=RUN_UID,
            holder=f"rank-{rank}",
            model_folder=folder / "model",
            storage=Storage(uri=f"file://{folder}"),
            weights=Weights(),
            rank=rank,
            world_size=2,
            expert=expert,
            rendezvous=f"file://{folder}/meet",
        )
    )
    learner.start_phase(PHASE, 0)
    controller = Controller(learner, folder, rank=rank)
    for number in range(VERSIONS):
        controller.publish(number)
        for step in range(number):
            learner.supervised_step(texts(10 * number + step))
    # The weights of a version come back, and one more delta goes on from it.
    controller.publish(VERSIONS)
    learner.copy_state("checkpoint")
    learner.save("checkpoint")
    dist.barrier()
    learner.supervised_step(texts(99))
    learner.restore("checkpoint")
    learner.supervised_step(texts(100))
    controller.publish(VERSIONS + 1)
    learner.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
