"""Verifies or deletes the objects of one checkpoint; the operator runs it as a Job."""

import hashlib
import os
from collections.abc import Mapping

from pydantic import ValidationError

from etude.common.blobs import MissingError, Store
from etude.common.checkpoint_orders import Order, ended_well_or_exit, order_in, patiently, verify
from etude.common.checkpoints import MANIFEST, CheckpointManifest
from etude.common.errors import CorruptError
from etude.common.files import store_for


def delete(store: Store, digest: str) -> None:
    """Take away what the manifest of this digest names, and nothing of anybody else.

    The manifest goes first, so that half of a checkpoint is never resumed from; until the rest
    is gone a copy under another name says what that is.

    Raises:
        CorruptError: the manifest cannot be read, and so nobody knows what belongs to it.
    """
    leaving = f"deleting-{digest}.json"
    present = _found(store, MANIFEST)
    is_ours = present is not None and hashlib.sha256(present).hexdigest() == digest
    if present is not None and is_ours:
        store.put(leaving, present)
        store.delete([MANIFEST])
    copy = _found(store, leaving)
    if copy is None:
        return  # gone, or the prefix holds another checkpoint by now
    kept = set() if present is None or is_ours else _keys(store, present)
    store.delete(sorted(_keys(store, copy) - kept))
    store.delete([leaving])


def _found(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except MissingError:
        return None


def _keys(store: Store, manifest: bytes) -> set[str]:
    try:
        return {item.key for item in CheckpointManifest.model_validate_json(manifest).objects}
    except ValidationError as cause:
        raise CorruptError(f"{store.url}/{MANIFEST}: {cause}") from cause


def carry_out(order: Order) -> None:
    """Do what was ordered; a store that is down for a while is waited for.

    Raises:
        CorruptError: the checkpoint is not what was registered.
        StoreError: the store stayed away.
    """
    store = store_for(order.uri, order.storage)

    def work() -> None:
        if order.action == "delete":
            delete(store, order.digest)
        else:
            verify(store, order.digest, depth=order.depth)

    patiently(work)


def main(env: Mapping[str, str] = os.environ) -> None:
    """Carry out the order in ETUDE_ORDER."""
    ended_well_or_exit(lambda: carry_out(order_in(env)))


if __name__ == "__main__":
    main()
