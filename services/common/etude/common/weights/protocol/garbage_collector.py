"""Garbage collector of versions: deletes objects that no reader and no successor needs."""

import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, FencedError
from etude.common.weights.protocol.chain import accepted_chain, lineage
from etude.common.weights.protocol.epochs import latest_epoch
from etude.common.weights.protocol.folded import read_keyframe
from etude.common.weights.protocol.listing import FoldedObjects, take_listing
from etude.common.weights.protocol.manifest import read_manifest
from etude.common.weights.protocol.quarantine import list_quarantined
from etude.common.weights.protocol.reader_leases import ObservedLease, observe_leases
from etude.common.weights.protocol.retention import (
    Inventory,
    Retention,
    RetentionPlan,
    Roots,
    deletable_keys,
    plan_retention,
    required_keys,
)
from etude.common.weights.protocol.tombstones import (
    MAX_KEYS,
    Tombstone,
    read_trash,
    write_tombstone,
)
from etude.common.weights.protocol.versions import TRASH, VersionId, list_all_published

MAX_IDLE_ROUNDS = 10
"""A lease that was not renewed for this many rounds is abandoned, and is ignored."""


@dataclass(slots=True, kw_only=True)
class GarbageCollector:
    """Of the open epoch, one per run; the rounds must be further apart than leases' renewals."""

    store: Store
    epoch: int
    resumable: Callable[[], Collection[VersionId]]
    """Versions of retained checkpoints, looked up each time."""
    served: Callable[[], Collection[VersionId]] = frozenset
    """Versions that channels serve, or may go back to; looked up each time."""
    retention: Retention = field(default_factory=Retention)
    _idle_rounds: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By replica: what its lease was, and for how many rounds."""
    _unused: set[str] = field(default_factory=set)
    """Own tombstones under which nothing was deleted yet: only these may be withdrawn."""

    def collect(self) -> list[str]:
        """Run one round of deletions; a round that fails may be repeated immediately.

        Writes the tombstone first, looks again for readers, and deletes only if there are none.

        Returns:
            The deleted keys, in order.

        Raises:
            FencedError: a newer epoch was opened; nothing more was deleted.
            CorruptError: an epoch is damaged; nothing more was deleted.
            StoreError: the store failed; the next round finishes the announced deletions.
        """
        resting = self._count_idle_rounds()
        deleted = self._finish()
        pending = read_trash(self.store).keys
        doomed = [key for key in self._observe().deletable if key not in pending]
        for start in range(0, len(doomed), MAX_KEYS):
            keys = tuple(doomed[start : start + MAX_KEYS])
            tombstone = Tombstone(id=uuid.uuid4().hex, epoch=self.epoch, keys=keys)
            self._unused.add(tombstone.id)
            write_tombstone(self.store, tombstone)
        if doomed:
            deleted += self._finish()
        self._idle_rounds = resting
        return deleted

    def _finish(self) -> list[str]:
        """Carry out every announced deletion whose keys are not needed.

        Raises:
            FencedError: a newer epoch was opened.
        """
        deleted: list[str] = []
        for tombstone in read_trash(self.store).tombstones:
            try:
                seen = self._observe()
            except FencedError:
                self._withdraw(self._unused)
                raise
            if seen.needed.isdisjoint(tombstone.keys):
                self._unused.discard(tombstone.id)
                self.store.delete(tombstone.keys)
                self.store.delete([tombstone.key])
                deleted += tombstone.keys
            else:
                self._withdraw(self._unused & {tombstone.id})
        return deleted

    def _withdraw(self, ids: set[str]) -> None:
        # Never another's, nor one of an earlier process: some of their keys may be deleted, or
        # be so at any moment, and readers must go on going around it.
        self.store.delete([f"{TRASH}{each}.json" for each in sorted(ids)])
        self._unused = self._unused - ids

    def _observe(self) -> "_Observation":
        """Observe the present objects and their readers.

        Raises:
            FencedError: a newer epoch was opened.
        """
        latest = latest_epoch(self.store)
        if latest is None or latest.epoch != self.epoch:
            opened = "none" if latest is None else latest.epoch
            raise FencedError(f"epoch {opened} is open, not {self.epoch}; nothing was deleted")
        leases = [lease for lease in observe_leases(self.store) if not self._is_abandoned(lease)]
        roots = Roots(
            leased=frozenset(lease.needs for lease in leases if lease.needs is not None),
            resumable=frozenset(self.resumable()),
            served=frozenset(self.served()),
        )
        inventory = take_inventory(self.store, self.epoch, roots)
        stays = plan_retention(inventory, roots, self.retention)
        doomed = deletable_keys(inventory, stays)
        if all(lease.is_readable for lease in leases):
            return _Observation(doomed, required_keys(inventory, stays))
        everything = RetentionPlan(inventory.published, frozenset(inventory.listing.keyframes))
        return _Observation([], required_keys(inventory, everything) | set(doomed))

    def _count_idle_rounds(self) -> dict[str, tuple[str, int]]:
        """Rounds without a renewal of each lease, this one included."""
        counts: dict[str, tuple[str, int]] = {}
        for lease in observe_leases(self.store):
            token, rounds = self._idle_rounds.get(lease.replica, ("", 0))
            counts[lease.replica] = (lease.token, rounds + 1 if token == lease.token else 0)
        return counts

    def _is_abandoned(self, lease: ObservedLease) -> bool:
        token, rounds = self._idle_rounds.get(lease.replica, ("", 0))
        return token == lease.token and rounds >= MAX_IDLE_ROUNDS


class _Observation(NamedTuple):
    deletable: list[str]
    needed: set[str]


def take_inventory(store: Store, epoch: int, roots: Roots) -> Inventory:
    """Inventory of the store of an open epoch."""
    chain = accepted_chain(store)
    lines = [lineage(store, root) for root in (roots.resumable - set(chain)) | roots.served]
    listing = take_listing(store)
    refused = list_quarantined(store)
    keyframes = {v for v, each in listing.keyframes.items() if _is_sound(store, v, each)}
    return Inventory(
        epoch=epoch,
        chain=chain,
        published=frozenset(list_all_published(store)),
        lineages=[line for line in lines if line],
        listing=listing,
        anchors=frozenset((listing.complete | keyframes) - refused),
    )


def _is_sound(store: Store, version: VersionId, keyframe: FoldedObjects) -> bool:
    """Return true if a keyframe is complete and of the version that was published."""
    if keyframe.record is None:
        return False
    try:
        record = read_keyframe(store, version)
        published = read_manifest(store, version)
    except (MissingError, CorruptError):
        return False
    listed = {info.key: info.size for info in keyframe.parts}
    whole = all(listed.get(item.key) == item.size for item in record.objects)
    return whole and record.target == published.ref
