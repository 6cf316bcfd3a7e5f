"""The trainer of the real engines: steps, its own ledger, versions through the publishing line."""

import random
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tests.harness.chaos.engines.policy import SHAPES, Trainer, sha256, state
from tests.harness.chaos.journal import Journal
from tests.harness.chaos.publisher import FENCED, checkpoint, retained, retried
from tests.harness.chaos.settings import RUN, Settings
from tests.harness.chaos.stores import faulty
from tests.support.weights.publishing import TrainedPolicy

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import FencedError
from etude.common.weights import VersionId
from etude.common.weights.tensors.schema import Schema, TensorSpec, split_of

CHECKPOINT_EVERY, RETAINED = 3, 4

SCHEMA = Schema(
    grid=8,
    tensors=tuple(
        TensorSpec(name=name, dtype="BF16", shape=shape, split=split_of(name))
        for name, shape in SHAPES.items()
    ),
)


@dataclass(slots=True)
class Publisher:
    """One incarnation; what it knows of earlier ones is in the checkpoints and in the store."""

    settings: Settings
    store: Store
    journal: Journal
    trainer: Trainer
    epoch: int = 0
    number: int = 0
    policy: TrainedPolicy = field(init=False)

    def open(self, parent: VersionId | None, reason: str) -> int:
        """Resume from a checkpoint's version, and fence every earlier publisher; the epoch."""
        if parent is not None:
            self.trainer.load(checkpoint(self.settings, parent))
        if reason == "rollback":
            self.trainer.branch += 1 + random.SystemRandom().randrange(1 << 30)
            for left in retained(self.settings):
                if parent is not None and left.number > parent.number:
                    checkpoint(self.settings, left).unlink()
        self.epoch = retried(
            lambda: weights.claim_epoch(
                self.store, holder=self.journal.path.stem, parent=parent, reason=reason
            )
        )
        record = retried(lambda: weights.read_epoch(self.store, self.epoch))
        self.journal.write("opened", epoch=self.epoch, parent=record.parent)
        self.number = record.first_number
        self.policy = TrainedPolicy(SCHEMA, self.trainer.bits())
        if (base := record.parent) is not None:
            ref = retried(lambda: weights.read_manifest(self.store, base).ref)
            self.policy.published[base] = self.trainer.bits()
            self.policy.resume(ref)
        return self.epoch

    def publish(self) -> VersionId:
        """Train one step, say in the ledger what comes of it, and make it a version.

        Raises:
            FencedError: another publisher took over.
        """
        self.trainer.train()
        bits = self.trainer.bits()
        version = VersionId(self.epoch, self.number)
        Journal(self.settings.ledger).write(
            "will", version=str(version), sha=sha256(bits), state=state(bits)
        )
        self.policy.words = {name: words.copy() for name, words in bits.items()}
        retried(lambda: self.policy.publish(self.store, self.number, epoch=self.epoch, run=RUN).ref)
        # Only the last one is built on.
        self.policy.published = {version: self.policy.published[version]}
        self.number += 1
        if version.number % CHECKPOINT_EVERY == 0:
            self._save(version)
        return version

    def _save(self, version: VersionId) -> None:
        path = checkpoint(self.settings, version)
        beside = path.with_suffix(f".{self.epoch}.part")
        self.trainer.save(beside)
        beside.replace(path)
        for old in sorted(path.parent.glob("*.npz"))[:-RETAINED]:
            old.unlink(missing_ok=True)


def run(
    settings: Settings, who: str, link: Connection, parent: VersionId | None, reason: str
) -> None:
    """Do each order from the conductor, until fenced or told to end.

    Orders are "step", "end", or the version to go back to.

    Raises:
        SystemExit: a newer epoch was opened.
    """
    journal = settings.journal(who)
    publisher = Publisher(settings, faulty(settings, who, journal), journal, Trainer(settings.seed))
    try:
        link.send(publisher.open(parent, reason))
        while (order := link.recv()) != "end":
            if isinstance(order, VersionId):
                link.send(publisher.open(order, "rollback"))
            else:
                link.send(publisher.publish())
    except (FencedError, weights.QuarantinedVersionError):
        raise SystemExit(FENCED) from None
