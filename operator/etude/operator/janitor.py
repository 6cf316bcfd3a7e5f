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
    """Read everything back, or take everything away."""
    uri: Uri
    """Prefix of its objects."""
    digest: str
    """SHA-256 of its manifest."""
    storage: Storage
    """How to reach the store."""


def verify(store: Store, digest: str) -> None:
    """Read a whole checkpoint back.

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
    checkpoints.verify(store, StoredCheckpoint(manifest, "", digest))


def delete(store: Store) -> None:
    """Take a checkpoint away: the manifest first, so that half of one is never resumed from."""
    store.delete([MANIFEST])
    store.delete([info.key for info in store.list("")])


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
                delete(store)
            else:
                verify(store, order.digest)


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
