"""Publication of a version: payloads first, the manifest last, never after a takeover."""

import hashlib
import re

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, FencedError, StoreError, WrongStateError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.epochs import EpochRecord, create_epoch, is_fenced, read_epoch
from etude.common.weights.protocol.manifest import (
    VersionRef,
    WeightManifest,
    check_stored,
    payload_sha16,
    read_manifest,
)
from etude.common.weights.protocol.plan import is_reachable
from etude.common.weights.protocol.quarantine import QuarantinedVersionError, is_quarantined
from etude.common.weights.protocol.tombstones import read_trash
from etude.common.weights.protocol.versions import VersionId, delta_key, schema_key

_SHA256 = re.compile(r"[0-9a-f]{64}")


def put_schema(store: Store, data: bytes, sha256: str) -> str:
    """Store a schema under its digest; repeating it is harmless.

    Returns:
        Its key.

    Raises:
        ValueError: the digest is of other bytes.
        CorruptError: what the store has under this digest is damaged.
    """
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("the schema's digest is of other bytes")
    key = schema_key(sha256)
    if records.create_once(store, key, data) != data:
        raise CorruptError(f"{store.url}/{key}: content does not match its SHA-256 digest")
    return key


def read_schema_bytes(store: Store, sha256: str) -> bytes:
    """A stored schema, whose bytes are those that the digest names.

    Raises:
        MissingError: it was never stored.
        CorruptError: it is damaged, or the digest is none.
    """
    if not _SHA256.fullmatch(sha256):
        raise CorruptError(f"{store.url}: {sha256[:80]!r} is no digest of a schema")
    data = records.fetch(store, schema_key(sha256))
    if hashlib.sha256(data).hexdigest() != sha256:
        raise CorruptError(f"{store.url}/{schema_key(sha256)}: content does not match its digest")
    return data


def publish_payload(
    store: Store, version: VersionId, rank: int, data: bytes, *, complete: bool = False
) -> str:
    """Upload what one rank contributes; invisible until the manifest names it.

    Args:
        store: the run's store.
        version: what it is part of.
        rank: whose part.
        data: a container, whole.
        complete: whether the version has no base.

    Returns:
        Its key.
    """
    key = delta_key(version, rank, payload_sha16(data), complete=complete)
    store.put(key, data)
    return key


def publish_manifest(store: Store, manifest: WeightManifest) -> WeightManifest:
    """Make a version exist; repeating it with the same manifest is harmless.

    Returns:
        The manifest, which is in the store.

    Raises:
        FencedError: a newer publisher took over, or the version exists with other content.
        QuarantinedVersionError: it, or what it builds on, is refused for ever.
        WrongStateError: the base is gone.
        ValueError: the number is not the epoch's to publish, or the base is not on its line.
        StoreError: the store failed, or does not have every payload; call again.
    """
    version = manifest.version
    # Asked first too: what a fenced publisher misses may have been collected, for ever.
    _refuse_fenced(store, version)
    record = read_epoch(store, version.epoch)
    if version.number < record.first_number:
        raise ValueError(
            f"version {version}: epoch {version.epoch} starts at number {record.first_number}"
        )
    if is_quarantined(store, version):
        raise QuarantinedVersionError(f"version {version} is quarantined")
    if manifest.base is not None:
        _check_base(store, record, manifest.base)
    if store.head(schema_key(manifest.schema_sha256)) is None:
        raise StoreError(f"{store.url}/{schema_key(manifest.schema_sha256)}: not stored")
    check_stored(store, manifest.objects)
    _refuse_fenced(store, version)
    data = manifest.to_bytes()
    if records.create_once(store, version.manifest_key, data) != data:
        raise FencedError(
            f"{store.url}/{version.manifest_key}: published by another with other content"
        )
    return manifest


def _refuse_fenced(store: Store, version: VersionId) -> None:
    if is_fenced(store, version.epoch):
        raise FencedError(f"version {version}: epoch {version.epoch + 1} was opened; not published")


def _check_base(store: Store, record: EpochRecord, base: VersionRef) -> None:
    on_line = base.version == record.parent or (
        base.epoch == record.epoch and base.number >= record.first_number
    )
    if not on_line:
        raise ValueError(
            f"base {base.version} is neither of epoch {record.epoch} nor its parent {record.parent}"
        )
    if is_quarantined(store, base.version):
        raise QuarantinedVersionError(f"base {base.version} is quarantined")
    try:
        found = read_manifest(store, base.version)
    except MissingError as cause:
        raise WrongStateError(f"base {base.version} is gone: publish a complete version") from cause
    if found.ref != base:
        raise ValueError(f"base {base.version} is not what the store has under this name")


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
    if parent is not None and not _is_parent_reachable(store, parent):
        after = None if after is None else record.epoch
        record = create_epoch(store, holder=holder, parent=None, reason=reason, after=after)
    return record.epoch


def _is_parent_reachable(store: Store, parent: VersionId) -> bool:
    trash = read_trash(store)
    return not trash.damaged and is_reachable(store, parent, avoid=trash.keys)
