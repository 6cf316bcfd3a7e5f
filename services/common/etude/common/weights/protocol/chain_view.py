"""View of the chain at one moment, for plans; a refresh lists only new versions."""

from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from etude.common.blobs import Store
from etude.common.weights.protocol.chain import accepted_chain, lineage
from etude.common.weights.protocol.epochs import is_fenced, latest_epoch
from etude.common.weights.protocol.listing import Listing, refresh_listing, take_listing
from etude.common.weights.protocol.quarantine import list_quarantined
from etude.common.weights.protocol.versions import VersionId, list_published


class ChainView(NamedTuple):
    """Of a run's store."""

    refused: Set[VersionId]
    chain: list[VersionId]
    """Accepted, oldest first, refused ones among them."""
    listing: Listing

    @property
    def usable(self) -> list[VersionId]:
        """The accepted versions that are not refused, oldest first."""
        return [version for version in self.chain if version not in self.refused]


def take_view(store: Store) -> ChainView:
    """Look at everything.

    Raises:
        CorruptError: an epoch is damaged.
        StoreError: the store failed.
    """
    return ChainView(list_quarantined(store), accepted_chain(store), take_listing(store))


def take_lineage_view(store: Store, version: VersionId) -> ChainView:
    """Look at a version and those before it, whether accepted or abandoned, in place of the chain.

    Raises:
        CorruptError: an epoch is damaged.
        StoreError: the store failed.
    """
    return ChainView(list_quarantined(store), lineage(store, version), take_listing(store))


@dataclass(slots=True)
class ChainViewer:
    """Refreshes a view, and lists only objects after the newest version that it knows.

    Deletions, and objects written for older versions, are seen after reset(). So it suits a caller
    that deletes and writes nothing itself, and notices an old view by an object that is missing.
    """

    store: Store
    _view: ChainView | None = None
    _epoch: int = 0
    """The open one when it was looked at last."""

    def refresh(self) -> ChainView:
        """The store as it is now, as far as it grew.

        Raises:
            CorruptError: an epoch is damaged.
            StoreError: the store failed; what was known is forgotten.
        """
        known, self._view = self._view, None
        if known is None or not known.chain or is_fenced(self.store, self._epoch):
            latest = latest_epoch(self.store)
            # Asked first: an epoch that is opened meanwhile is found by the next look.
            self._epoch = 0 if latest is None else latest.epoch
            self._view = take_view(self.store)
        else:
            self._view = self._grown(known)
        return self._view

    def reset(self) -> None:
        """Look at everything the next time."""
        self._view = None

    def _grown(self, known: ChainView) -> ChainView:
        newest = known.chain[-1]
        after = newest.manifest_key if newest.epoch == self._epoch else ""
        refused = list_quarantined(self.store)
        found = list_published(self.store, self._epoch, after=after)
        chain = known.chain + [each for each in found if each.number > newest.number]
        # Of the newest one not everything was there, perhaps.
        return ChainView(refused, chain, refresh_listing(self.store, known.listing, newest))
