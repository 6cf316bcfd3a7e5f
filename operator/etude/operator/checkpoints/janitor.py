"""Verifies or deletes the objects of one checkpoint; the operator runs it as a Job."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Literal

import stamina
from pydantic import ValidationError

from etude.common import checkpoints
from etude.common.api.checkpointing import Depth
from etude.common.api.meta import Model, Uri
from etude.common.api.run import Storage
from etude.common.blobs import MissingError, Store
from etude.common.checkpoints import MANIFEST, CheckpointManifest, StoredCheckpoint
from etude.common.errors import CorruptError, EtudeError, StoreError
from etude.common.files import store_for

EXIT_CORRUPT = 65
"""EX_DATAERR of sysexits.h: the data is wrong and will stay wrong."""
EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL: the store did not answer."""

PATIENCE_S = 300.0


class Order(Model):
    """What to do to which checkpoint."""

    action: Literal["verify", "delete"]
    """Check that everything is there, or take everything away."""
    uri: Uri
    """Prefix of its objects."""
    digest: str
    """SHA-256 of its manifest."""
    storage: Storage
    """How to reach the store."""
    depth: Depth = "Checksums"
    """How far to verify."""


def verify(store: Store, digest: str, *, depth: Depth = "Checksums") -> None:
    """Check a checkpoint: that all of it is there, or by reading all of it back.

    Raises:
        CorruptError: something is missing or differs from what was registered.
    """
    try:
        data = store.get(MANIFEST)
        manifest = CheckpointManifest.model_validate_json(data)
    except MissingError as cause:
        raise CorruptError(f"{store.url}/{MANIFEST}: is missing") from cause
    except ValidationError as cause:
        raise CorruptError(f"{store.url}/{MANIFEST}: {cause}") from cause
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise CorruptError(f"{store.url}/{MANIFEST}: has digest {found[:12]}, not {digest[:12]}")
    check = checkpoints.find if depth == "Manifest" else checkpoints.verify
    check(store, StoredCheckpoint(manifest, "", digest))


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
    for attempt in stamina.retry_context(on=StoreError, timeout=PATIENCE_S, attempts=None):
        with attempt:
            if order.action == "delete":
                delete(store, order.digest)
            else:
                verify(store, order.digest, depth=order.depth)


def main(env: Mapping[str, str] = os.environ) -> None:
    """Carry out the order in ETUDE_ORDER."""
    try:
        carry_out(Order.model_validate(json.loads(env["ETUDE_ORDER"])))
    except CorruptError as error:
        _end(str(error), EXIT_CORRUPT)
    except EtudeError as error:
        _end(str(error), EXIT_TRY_AGAIN)


def _end(words: str, code: int) -> None:
    sys.stderr.write(f"{words}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
