"""The chain of policy versions that this controller extends."""

import asyncio
import logging
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from opentelemetry.context import Context

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, FencedError, WrongStateError
from etude.common.weights import VersionId
from etude.common.weights.protocol import publication
from etude.common.weights.protocol.manifest import WeightManifest, read_manifest
from etude.trainer.controller.reporting.rows import Place
from etude.trainer.controller.store_retry import Patience
from etude.trainer.export.receipts import Base, manifest_of
from etude.trainer.rollouts.protocol import Learners

log = logging.getLogger(__name__)


class BaseLostError(WrongStateError):
    """What a version builds on was deleted or is refused; a complete version needs nothing."""

    reason: ClassVar[str] = "BaseLost"


class Encoded(NamedTuple):
    """A version that the ranks hold in their memory, on its way to the store."""

    manifest: WeightManifest
    started_s: float
    """Of time.monotonic()."""
    place: Place
    """Where in the run its weights are."""
    sequence: int
    """Newest journal record that led to them."""
    is_served: bool
    """Whether engines shall serve it before it has arrived."""
    trace: Context
    """Of the step."""


@dataclass(slots=True, kw_only=True)
class Versions:
    """Has each version built on the one before, and makes it exist.

    A manifest is complete once its version is encoded: the next one can name it by its hash, and
    only has to be committed after it.
    """

    store: Store
    run_uid: str
    holder: str
    """Who publishes, for people."""
    base: Base | None = None
    """The newest version that is encoded; None before the first, or to build on nothing."""

    async def resume(self, version: VersionId) -> None:
        """Go on from a version of an earlier controller, if the store still has it."""
        try:
            found = await asyncio.to_thread(read_manifest, self.store, version)
        except (MissingError, CorruptError) as error:
            log.warning("the next version is complete: %s", error)
            self.base = None
        else:
            self.base = Base(found.ref, found.schema_sha256)

    async def encode(
        self, learners: Learners, version: VersionId, *, step: int, patience: Patience
    ) -> WeightManifest:
        """Have the ranks encode their parts; what is to be committed.

        Raises:
            NonFiniteWeightsError: no version was encoded.
            StoreError: the store stayed away.
        """
        base = self.base
        receipts = await patience.keep_trying(
            f"policy version {version}", lambda: learners.encode(version, base)
        )
        manifest = manifest_of(
            receipts,
            run=self.run_uid,
            version=version,
            step=step,
            holder=self.holder,
            base=None if base is None else base.ref,
        )
        self.base = Base(manifest.ref, manifest.schema_sha256)
        return manifest

    async def commit(
        self, learners: Learners, manifest: WeightManifest, *, patience: Patience
    ) -> None:
        """Have the ranks upload what they encoded, then make it exist; in the order of encoding.

        Raises:
            BaseLostError: it cannot be, because of what it builds on; nor can what builds on it.
            FencedError: a newer controller took over.
            StoreError: the store stayed away.
            WrongStateError: the version was quarantined before it existed.
        """
        what = f"policy version {manifest.version}"
        # Repeating either is harmless: the same bytes go to the same keys.
        await patience.keep_trying(what, lambda: learners.upload(manifest.version))
        try:
            await patience.keep_trying(what, lambda: self._committed(manifest))
        except FencedError:
            raise
        except WrongStateError as error:
            if manifest.base is None:
                raise
            raise BaseLostError(f"{what}: {error}") from error

    async def _committed(self, manifest: WeightManifest) -> None:
        await asyncio.to_thread(publication.commit, self.store, manifest)
