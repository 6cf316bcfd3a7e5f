"""The trainer's process: steps, ledger, payloads of two ranks, manifest, checkpoint."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from tests.harness.chaos import model, mutations
from tests.harness.chaos.journal import Journal
from tests.harness.chaos.model import Bits, Trainer
from tests.harness.chaos.policy import SCHEMA, Step, receipts
from tests.harness.chaos.settings import RUN, Settings
from tests.harness.chaos.stores import faulty

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import CorruptError, FencedError, StoreError, WrongStateError
from etude.common.weights import VersionId, VersionRef
from etude.common.weights.protocol import versions
from etude.trainer.export.receipts import build_manifest

T = TypeVar("T")

CHECKPOINT_EVERY = 5
RETAINED = 3
MOST_DAMAGED = 4
"""So often in a row chance alone damages nothing."""
KINDS: dict[str, model.Kind] = {"dense": "dense", "same": "same"}
"""Of steps, by order; all others are usual ones."""
FENCED = 3
"""Exit status of a publisher that was taken over."""


@dataclass(slots=True)
class Publisher:
    """One incarnation; everything it knows of earlier ones is in the checkpoints."""

    settings: Settings
    store: Store
    journal: Journal
    trainer: Trainer
    epoch: int = 0
    number: int = 0
    base: VersionRef | None = None
    old: Bits = field(default_factory=dict)
    """Bits of the base."""

    def open(self, parent: VersionId | None, reason: str) -> None:
        """Resume from a checkpoint's version, and fence every earlier publisher."""
        if parent is not None:
            self.trainer.load(checkpoint(self.settings, parent))
        if reason == "rollback":
            self.trainer.branch += 1 + random.SystemRandom().randrange(1 << 30)
        retried(lambda: weights.put_schema(self.store, SCHEMA.to_bytes(), SCHEMA.sha256))
        self.epoch = retried(
            lambda: weights.claim_epoch(
                self.store, holder=self.journal.path.stem, parent=parent, reason=reason
            )
        )
        record = retried(lambda: weights.read_epoch(self.store, self.epoch))
        self.journal.write("opened", epoch=self.epoch, parent=record.parent)
        self.number = record.first_number
        self.old = self.trainer.bits()
        if record.parent is not None:
            self.base = retried(lambda: self._ref(record.parent))

    def _ref(self, version: VersionId | None) -> VersionRef | None:
        """The version that the next one builds on; None if that cannot be read any more."""
        try:
            return None if version is None else weights.read_manifest(self.store, version).ref
        except CorruptError:
            return None

    def publish(self, order: str) -> VersionId:
        """Train one step, say in the ledger what comes of it, and make it a version.

        Raises:
            FencedError: another publisher took over.
            CorruptError: the store is damaged.
            WrongStateError: the version cannot be published.
        """
        self.trainer.train(KINDS.get(order, "step"))
        new = self.trainer.bits()
        version = VersionId(self.epoch, self.number)
        Journal(self.settings.ledger).write("will", version=str(version), sha=model.sha256(new))
        if order == "complete":
            self.base = None
        try:
            self.base = retried(lambda: self._commit(version, new, lies=order == "lie"))
        except (WrongStateError, CorruptError) as error:
            if isinstance(error, FencedError) or self.base is None:
                raise
            self.base = None  # nothing can be built on any more
            self.base = retried(lambda: self._commit(version, new, lies=False))
        self.old = new
        self.number += 1
        if version.number % CHECKPOINT_EVERY == 0 and order != "lie":
            self._save(version)
        return version

    def _commit(self, version: VersionId, new: Bits, *, lies: bool) -> VersionRef:
        step = Step(None if self.base is None else self.old, _spoilt(new) if lies else new)
        found = receipts(self.store, version, step)
        step_number, holder = self.trainer.step, self.journal.path.stem
        manifest = build_manifest(
            found, run=RUN, version=version, step=step_number, holder=holder, base=self.base
        )
        if lies:
            # What a broken packer would publish: sound hashes around the wrong weights.
            honest = receipts(self.store, version, step._replace(new=new))
            true = build_manifest(
                honest, run=RUN, version=version, step=step_number, holder=holder, base=self.base
            )
            manifest = manifest.model_copy(update={"state": true.state})
        return weights.publish_manifest(self.store, manifest).ref

    def _save(self, version: VersionId) -> None:
        path = checkpoint(self.settings, version)
        path.parent.mkdir(exist_ok=True)
        beside = path.with_suffix(f".{self.epoch}.part")
        self.trainer.save(beside)
        beside.replace(path)
        for old in sorted(path.parent.glob("*.npz"))[:-RETAINED]:
            old.unlink(missing_ok=True)


def checkpoint(settings: Settings, version: VersionId) -> Path:
    """Where the checkpoint of a version is."""
    return settings.checkpoints / f"{version.label}.npz"


def retained(settings: Settings) -> list[VersionId]:
    """Versions of the checkpoints that are there, oldest first."""
    found = (versions.parse_label(path.stem) for path in settings.checkpoints.glob("*.npz"))
    return sorted(version for version in found if version is not None)


def retried(work: Callable[[], T]) -> T:
    """Repeat what a store refuses for now, as the trainer waits for its store.

    Raises:
        CorruptError: again and again, for damage on the way does not repeat.
    """
    damaged = 0
    while True:
        try:
            return work()
        except StoreError:
            time.sleep(0.02)
        except CorruptError:
            damaged += 1
            if damaged == MOST_DAMAGED:
                raise


def _spoilt(new: Bits) -> Bits:
    name = "layers.0.gate.weight"
    wrong = new[name].copy()
    wrong[7] ^= 1
    return new | {name: wrong}


def run(
    settings: Settings, who: str, link: Connection, parent: VersionId | None, reason: str
) -> None:
    """Publish a version for each order from the conductor, until fenced or told to end.

    Raises:
        SystemExit: a newer epoch was opened.
    """
    mutations.apply(settings.mutation)
    journal = settings.journal(who)
    publisher = Publisher(settings, faulty(settings, who, journal), journal, Trainer(settings.seed))
    try:
        publisher.open(parent, reason)
        link.send(("opened", publisher.epoch))
        while (order := link.recv()) != "end":
            link.send(("published", publisher.publish(order)))
    except (FencedError, weights.QuarantinedVersionError):
        journal.write("fenced", epoch=publisher.epoch)
        raise SystemExit(FENCED) from None
