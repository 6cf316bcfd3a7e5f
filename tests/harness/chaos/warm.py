"""Imported once by the process that all roles are forked from: compiled loops are loaded here."""

import tempfile
from pathlib import Path

from tests.harness.chaos import keeper, publisher, replica, runner
from tests.harness.chaos.model import Trainer
from tests.harness.chaos.policy import SCHEMA, Step, receipts
from tests.harness.chaos.settings import RUN

from etude.common import weights
from etude.common.blobs import MemoryStore
from etude.common.weights import VersionId
from etude.common.weights.replicas.mirror import Mirror
from etude.trainer.export.receipts import build_manifest

PRELOADED = (keeper, publisher, replica, runner)


def _load_compiled_loops() -> None:
    """Publish and read two versions in memory."""
    trainer, store, base, old = Trainer(0), MemoryStore(), None, None
    weights.put_schema(store, SCHEMA.to_bytes(), SCHEMA.sha256)
    weights.claim_epoch(store, holder="warm", parent=None, reason="start")
    with tempfile.TemporaryDirectory() as folder:
        mirror = Mirror(store, Path(folder))
        for number in range(2):
            version, new = VersionId(1, number), trainer.bits()
            found = receipts(store, version, Step(old, new))
            manifest = build_manifest(found, run=RUN, version=version, step=0, holder="", base=base)
            base, old = weights.publish_manifest(store, manifest).ref, new
            mirror.move_to(version)
            trainer.train("step")


_load_compiled_loops()
