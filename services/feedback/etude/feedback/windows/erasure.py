"""Deletion of the stored rollouts of erased users."""

from collections.abc import Collection, Mapping

from etude.common.blobs import Store
from etude.common.feedback import windows
from etude.feedback.ledger.user_keys import UserId
from etude.feedback.windows.waiting import Erasure


def delete_rollouts(
    store: Store, users: Collection[UserId], erasures: Mapping[UserId, Erasure]
) -> None:
    """Delete the stored rollouts of erased users, but those of windows that knew the erasure.

    Safe to repeat. Such windows hold what a user did after agreeing again.

    Raises:
        CorruptError: a window is damaged.
        StoreError: the store did not answer.
    """
    keys = {info.key for user in users for info in store.list(windows.rollout_prefix(*user))}
    if not keys:
        return
    for number in windows.list_windows(store):
        manifest = windows.read_window(store, number)
        for each in manifest.rollouts:
            erasure = erasures.get(UserId(each.tenant, each.user))
            if erasure is not None and manifest.last_sequence >= erasure.sequence:
                keys.discard(windows.rollout_key(each.tenant, each.user, each.rollout))
    store.delete(sorted(keys))
