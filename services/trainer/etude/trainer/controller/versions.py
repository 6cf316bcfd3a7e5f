"""The chain of policy versions that this controller extends."""

import asyncio
import logging
from dataclasses import dataclass

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, FencedError, WrongStateError
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import WeightManifest, read_manifest
from etude.trainer.controller.patience import Patience
from etude.trainer.receipts import Base, manifest_of
from etude.trainer.work import Learners

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Versions:
    """Has each version built on the one before, and makes it exist."""

    store: Store
    run_uid: str
    holder: str
    """Who publishes, for people."""
    base: Base | None = None
    """The newest version that exists; None before the first."""

    async def resume(self, version: VersionId) -> None:
        """Go on from a version of an earlier controller, if the store still has it."""
        try:
            found = await asyncio.to_thread(read_manifest, self.store, version)
        except (MissingError, CorruptError) as error:
            log.warning("the next version is complete: %s", error)
            self.base = None
        else:
            self.base = Base(found.ref, found.schema_sha256)

    async def publish(
        self, learners: Learners, version: VersionId, *, step: int, patience: Patience
    ) -> WeightManifest:
        """Have the ranks upload their parts, then commit them.

        Raises:
            FencedError: a newer controller took over.
            NonFiniteWeightsError: no version was published.
            StoreError: the store stayed away.
            WrongStateError: the version was quarantined before it existed.
        """
        what = f"policy version {version}"
        base = self.base
        # Repeating it is harmless: the same weights make the same objects.
        receipts = await patience.keep_trying(what, lambda: learners.publish(version, base))
        manifest = manifest_of(
            receipts,
            run=self.run_uid,
            version=version,
            step=step,
            holder=self.holder,
            base=None if base is None else base.ref,
        )
        try:
            await patience.keep_trying(what, lambda: self._committed(manifest))
        except FencedError:
            raise
        except WrongStateError as error:
            if manifest.base is None:
                raise
            # What it builds on was deleted or is refused: a complete version needs nothing.
            log.warning("%s is published complete: %s", what, error)
            self.base = None
            return await self.publish(learners, version, step=step, patience=patience)
        self.base = Base(manifest.ref, manifest.schema_sha256)
        return manifest

    async def _committed(self, manifest: WeightManifest) -> None:
        await asyncio.to_thread(publication.commit, self.store, manifest)
