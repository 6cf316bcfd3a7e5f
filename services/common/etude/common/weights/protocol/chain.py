"""The accepted chain: which published versions count."""

from collections.abc import Collection
from typing import NamedTuple

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError
from etude.common.weights.protocol.epochs import (
    EpochRecord,
    epoch_or_none,
    is_fenced,
    latest_epoch,
    read_epoch,
)
from etude.common.weights.protocol.versions import MAX_NUMBER, VersionId, epoch_key, list_published


class _Link(NamedTuple):
    """One epoch of the accepted chain, and its last number that is accepted."""

    record: EpochRecord
    last: int

    def accepts(self, version: VersionId) -> bool:
        same_epoch = version.epoch == self.record.epoch
        return same_epoch and self.record.first_number <= version.number <= self.last


def _links(store: Store) -> list[_Link]:
    """The epochs of the accepted chain, newest first."""
    return _links_from(store, latest_epoch(store), MAX_NUMBER)


def _links_from(store: Store, record: EpochRecord | None, last: int) -> list[_Link]:
    links: list[_Link] = []
    while record is not None:
        links.append(_Link(record, last))
        parent = record.parent
        record = None if parent is None else _parent_record(store, record.epoch, parent)
        last = -1 if parent is None else parent.number
    return links


def _parent_record(store: Store, epoch: int, parent: VersionId) -> EpochRecord:
    """The record of the epoch that another goes on from; none is ever deleted.

    Raises:
        CorruptError: it is missing or damaged.
    """
    try:
        return read_epoch(store, parent.epoch)
    except MissingError as cause:
        where = f"{store.url}/{epoch_key(parent.epoch)}"
        raise CorruptError(f"{where}: missing, though epoch {epoch} goes on from it") from cause


def _published_in(store: Store, link: _Link) -> list[VersionId]:
    return [v for v in list_published(store, link.record.epoch) if link.accepts(v)]


def accepted_chain(store: Store) -> list[VersionId]:
    """Every published version that counts, oldest first.

    Staleness is a difference of positions in this list, not of numbers.
    """
    chain: list[VersionId] = []
    for link in reversed(_links(store)):
        chain += _published_in(store, link)
    return chain


def lineage(store: Store, version: VersionId) -> list[VersionId]:
    """A version and the published ones before it, oldest first, whether accepted or abandoned."""
    chain: list[VersionId] = []
    start = epoch_or_none(store, version.epoch)
    for link in reversed(_links_from(store, start, version.number)):
        chain += _published_in(store, link)
    return chain


def newest_version(
    store: Store, *, besides: Collection[VersionId] = frozenset()
) -> VersionId | None:
    """The newest accepted version, besides refused ones; None before the first."""
    for link in _links(store):
        accepted = [version for version in _published_in(store, link) if version not in besides]
        if accepted:
            return accepted[-1]
    return None


def is_accepted(store: Store, version: VersionId) -> bool:
    """The reader's rule: ask after reading the manifest, before using the version.

    A version counts while no newer epoch exists, or if the newer epochs descend from it. With
    read-after-write consistency a manifest that a fenced publisher creates is always refused.
    """
    record = epoch_or_none(store, version.epoch)
    if record is None or version.number < record.first_number:
        return False
    if not is_fenced(store, version.epoch):
        return True
    return any(link.accepts(version) for link in _links(store))
