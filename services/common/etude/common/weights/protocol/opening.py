"""Opening an epoch: fence every earlier publisher, then see that the parent is still whole."""

from etude.common.blobs import Store
from etude.common.weights.protocol.epochs import create_epoch
from etude.common.weights.protocol.plan import is_reachable
from etude.common.weights.protocol.trash import read_trash
from etude.common.weights.protocol.versions import VersionId


def claim_epoch(
    store: Store, *, holder: str, parent: VersionId | None, reason: str, after: int | None = None
) -> int:
    """Open the next epoch and thereby fence every earlier publisher.

    A collector writes its tombstone before it reads the epochs, and an opener writes its epoch
    before it reads the tombstones: one always sees the other. If the parent, or every path to it,
    is being deleted, then another epoch without a parent is opened: its first version must be
    complete.

    Args:
        store: the run's store.
        holder: who claims, for people.
        parent: the version stored in the checkpoint being resumed; later ones are abandoned.
        reason: start, takeover or rollback.
        after: the epoch that the caller holds and continues; unset takes over from any publisher.

    Returns:
        The new epoch, at least 1; read_epoch() tells its parent.

    Raises:
        ValueError: the reason is not start, takeover or rollback.
        FencedError: other publishers kept winning, or another took over from the caller.
        CorruptError: an epoch's record is damaged, or the parent's is missing.
        WrongStateError: keys can name no further epoch, or no further version.
        StoreError: the store failed; claim again.
    """
    record = create_epoch(store, holder=holder, parent=parent, reason=reason, after=after)
    if parent is not None and not _is_whole(store, parent):
        after = None if after is None else record.epoch
        record = create_epoch(store, holder=holder, parent=None, reason=reason, after=after)
    return record.epoch


def _is_whole(store: Store, parent: VersionId) -> bool:
    trash = read_trash(store)
    return not trash.damaged and is_reachable(store, parent, avoid=trash.keys)
