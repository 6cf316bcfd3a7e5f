"""Chain of policy versions that this controller extends."""

import asyncio
import logging
from dataclasses import dataclass
from typing import ClassVar

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, FencedError, WrongStateError
from etude.common.store_retry import StoreRetry
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import WeightManifest, read_manifest
from etude.trainer.export.receipts import PublishBase, build_manifest
from etude.trainer.learner.protocol import Learners

log = logging.getLogger(__name__)


class BaseLostError(WrongStateError):
    """The base of a version was deleted or is quarantined; a complete version needs no base."""

    reason: ClassVar[str] = "BaseLost"


@dataclass(slots=True, kw_only=True)
class VersionChain:
    """Builds each version on the one before, and publishes it.

    The manifest is known once the version is encoded, so the next version can name it by its hash
    before it is published, and must only be published after it.
    """

    store: Store
    run_uid: str
    holder: str
    """Name of the publisher, shown to people."""
    base: PublishBase | None = None
    """The newest encoded version; None makes the next version complete."""

    async def resume(self, version: VersionId) -> None:
        """Continue from a version of an earlier controller, if the store still has it."""
        try:
            found = await asyncio.to_thread(read_manifest, self.store, version)
        except (MissingError, CorruptError) as error:
            log.warning("the next version is complete: %s", error)
            self.base = None
        else:
            self.base = PublishBase(found.ref, found.schema_sha256)

    async def encode(
        self, learners: Learners, version: VersionId, *, step: int, store_retry: StoreRetry
    ) -> WeightManifest:
        """Have the ranks encode their parts; return the manifest to publish.

        Raises:
            NonFiniteWeightsError: no version was encoded.
            StoreError: the store stayed away.
        """
        base = self.base
        receipts = await store_retry.retry(
            f"policy version {version}", lambda: learners.encode(version, base)
        )
        manifest = build_manifest(
            receipts,
            run=self.run_uid,
            version=version,
            step=step,
            holder=self.holder,
            base=None if base is None else base.ref,
        )
        self.base = PublishBase(manifest.ref, manifest.schema_sha256)
        return manifest

    async def upload_and_publish(
        self, learners: Learners, manifest: WeightManifest, *, store_retry: StoreRetry
    ) -> None:
        """Have the ranks upload a version, then publish its manifest; in the order of encoding.

        Raises:
            BaseLostError: its base is lost; it and its successors can never be published.
            FencedError: a newer controller took over.
            StoreError: the store stayed away.
            WrongStateError: the version was quarantined before its manifest.
        """
        what = f"policy version {manifest.version}"
        # Both are idempotent: the same bytes go to the same keys.
        await store_retry.retry(what, lambda: learners.upload(manifest.version))
        try:
            await store_retry.retry(what, lambda: self._publish_manifest(manifest))
        except FencedError:
            raise
        except WrongStateError as error:
            if manifest.base is None:
                raise
            raise BaseLostError(f"{what}: {error}") from error

    async def _publish_manifest(self, manifest: WeightManifest) -> None:
        await asyncio.to_thread(publication.publish_manifest, self.store, manifest)
