"""Program of a checkpoint's Job: verifies or deletes the objects of one checkpoint."""

import hashlib
import os
from collections.abc import Mapping

from pydantic import ValidationError

from etude.common.blobs import MissingError, Store
from etude.common.checkpoints.job import (
    CheckpointOrder,
    order_from_env,
    retry_store_errors,
    run_or_exit,
    verify_checkpoint,
)
from etude.common.checkpoints.manifest import MANIFEST, CheckpointManifest
from etude.common.errors import CorruptError
from etude.common.stores import open_run_store


def delete(store: Store, digest: str) -> None:
    """Delete the objects that the manifest of this digest names, and no others.

    The manifest is deleted first, so that half of a checkpoint is never resumed from; until the
    rest is deleted a copy under another name lists it.

    Raises:
        CorruptError: the manifest cannot be read, so its objects are unknown.
    """
    leaving = f"deleting-{digest}.json"
    present = _read(store, MANIFEST)
    is_ours = present is not None and hashlib.sha256(present).hexdigest() == digest
    if present is not None and is_ours:
        store.put(leaving, present)
        store.delete([MANIFEST])
    copy = _read(store, leaving)
    if copy is None:
        return  # deleted before, or the prefix holds another checkpoint by now
    kept = set() if present is None or is_ours else _keys(store, present)
    store.delete(sorted(_keys(store, copy) - kept))
    store.delete([leaving])


def _read(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except MissingError:
        return None


def _keys(store: Store, manifest: bytes) -> set[str]:
    try:
        return {item.key for item in CheckpointManifest.model_validate_json(manifest).objects}
    except ValidationError as cause:
        raise CorruptError(f"{store.url}/{MANIFEST}: {cause}") from cause


def carry_out(order: CheckpointOrder) -> None:
    """Carry out the order; wait for a store that is down for a while.

    Raises:
        CorruptError: the checkpoint differs from the registered one.
        StoreError: the store stayed unreachable.
    """
    store = open_run_store(order.uri, order.storage)

    def work() -> None:
        if order.action == "delete":
            delete(store, order.digest)
        else:
            verify_checkpoint(store, order.digest, depth=order.depth)

    retry_store_errors(work)


def main(env: Mapping[str, str] = os.environ) -> None:
    """Carry out the order in ETUDE_ORDER."""
    run_or_exit(lambda: carry_out(order_from_env(env)))


if __name__ == "__main__":
    main()
