"""Verify and delete jobs of checkpoints: the order of the operator, and exit codes."""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NoReturn

from pydantic import Field, ValidationError

from etude.common.api.meta import Model, Uri
from etude.common.api.run.checkpointing import Depth
from etude.common.api.storage import Storage
from etude.common.backoff import Backoff
from etude.common.blobs import MissingError, Store
from etude.common.checkpoints import manifest as checkpoints_manifest
from etude.common.checkpoints.manifest import MANIFEST, CheckpointManifest, StoredCheckpoint
from etude.common.errors import CorruptError, EtudeError, StoreError
from etude.common.process import EXIT_TRY_AGAIN

VARIABLE = "ETUDE_ORDER"
"""Environment variable that holds the order."""

EXIT_CORRUPT = 65
"""EX_DATAERR of sysexits.h: the data is wrong and will stay wrong."""

PATIENCE_S = 300.0


class CheckpointOrder(Model):
    """Order of the operator to a Job: verify or delete one checkpoint."""

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
    model: Annotated[str, Field(max_length=1_100)] | None = None
    """Load: the folder with the configuration of the model that the state is of, as the run names
    it; None for the checkpoint's own, if it has one."""


def verify_checkpoint(
    store: Store, digest: str, *, depth: Depth = "Checksums"
) -> CheckpointManifest:
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
    check = (
        checkpoints_manifest.check_sizes
        if depth == "Manifest"
        else checkpoints_manifest.check_digests
    )
    check(store, StoredCheckpoint(manifest, "", digest))
    return manifest


def retry_store_errors(work: Callable[[], None]) -> None:
    """Run work, and retry it with backoff while the store is unavailable.

    Raises:
        StoreError: the store stayed unavailable for PATIENCE_S.
    """
    backoff = Backoff(first_s=0.2, longest_s=5.0)
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            work()
        except StoreError:
            delay_s = backoff.next_s()
            if time.monotonic() + delay_s > until_s:
                raise
            time.sleep(delay_s)
        else:
            return


def order_from_env(env: Mapping[str, str]) -> CheckpointOrder:
    """The order in the environment of the process."""
    return CheckpointOrder.parse_known_fields(json.loads(env[VARIABLE]))


def run_or_exit(work: Callable[[], None]) -> None:
    """Run work; exit with EXIT_CORRUPT for wrong data, EXIT_TRY_AGAIN if the store is away."""
    try:
        work()
    except CorruptError as error:
        _end(str(error), EXIT_CORRUPT)
    except EtudeError as error:
        _end(str(error), EXIT_TRY_AGAIN)


def _end(words: str, code: int) -> NoReturn:
    sys.stderr.write(f"{words}\n")
    sys.exit(code)
