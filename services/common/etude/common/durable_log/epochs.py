"""Epochs of a log that belongs to no run: each writer claims the next one with a create-only put.

The trainer's journal has the epochs of its policy versions instead.
"""

import uuid

from etude.common.blobs import ExistsError, Store
from etude.common.errors import CorruptError, FencedError

_MAX_ATTEMPTS = 16
"""Each lost attempt means that another writer started; more of them are a broken set-up."""


def epoch_key(prefix: str, epoch: int) -> str:
    """Key of the object whose existence opens an epoch."""
    return f"{prefix}epochs/{epoch:06d}"


def claim_log_epoch(store: Store, prefix: str, *, holder: str) -> int:
    """Open the next epoch, which fences all earlier writers.

    Raises:
        FencedError: other writers kept winning.
        CorruptError: an object among the epochs has an invalid key.
    """
    content = f"{holder} {uuid.uuid4().hex}".encode()
    for _ in range(_MAX_ATTEMPTS):
        epoch = _latest_epoch(store, prefix) + 1
        key = epoch_key(prefix, epoch)
        try:
            store.create(key, content)
        except ExistsError:
            # A create whose reply was lost took effect; anything else is another writer.
            if store.get(key) != content:
                continue
        return epoch
    raise FencedError(f"{store.url}: {_MAX_ATTEMPTS} other writers opened an epoch meanwhile")


def is_log_fenced(store: Store, prefix: str, epoch: int) -> bool:
    """Return true if a newer writer took over."""
    return store.head(epoch_key(prefix, epoch + 1)) is not None


def _latest_epoch(store: Store, prefix: str) -> int:
    folder = f"{prefix}epochs/"
    latest = 0
    for info in store.list(folder):
        name = info.key.removeprefix(folder)
        if not name.isascii() or not name.isdigit():
            raise CorruptError(f"{store.url}/{info.key}: not the key of an epoch")
        latest = max(latest, int(name))
    return latest
