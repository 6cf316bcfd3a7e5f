"""Whole versions in and out of the store: payloads first, the manifest last."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from blake3 import blake3

from etude.common.blobs import ExistsError, MissingError, Store
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.weights.protocol.epochs import is_fenced, read_epoch
from etude.common.weights.protocol.full import FullManifest, FullObject
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.tensors import safetensors
from etude.common.weights.tensors.safetensors import Tensor

PART_BYTES = 256 << 20
"""Size at which a payload object is closed: it bounds the memory of both sides."""


def publish(
    store: Store,
    *,
    run: str,
    version: VersionId,
    step: int,
    holder: str,
    tensors: Iterable[Tensor],
) -> FullManifest:
    """Make a complete version visible to every reader; repeating it is harmless.

    Args:
        store: the run's store.
        run: UID of the run.
        version: a number not below the epoch's first, in an epoch that the caller claimed.
        step: optimiser steps of the run so far.
        holder: who publishes, for people.
        tensors: every tensor of the model once, tied weights once, names as in Hugging Face.

    Returns:
        The manifest, which is in the store.

    Raises:
        FencedError: a newer publisher took over, or this version exists with other content.
        ValueError: the number is below the epoch's first, or a name comes twice.
        StoreError: the store failed; publish again.
    """
    first = read_epoch(store, version.epoch).first_number
    if version.number < first:
        raise ValueError(f"version {version}: epoch {version.epoch} starts at number {first}")
    seen: set[str] = set()
    objects = [
        _put_part(store, version, index, part) for index, part in enumerate(_parts(tensors, seen))
    ]
    manifest = FullManifest(
        run=run,
        epoch=version.epoch,
        number=version.number,
        step=step,
        holder=holder,
        tensors=len(seen),
        objects=objects,
    )
    if is_fenced(store, version.epoch):
        raise FencedError(f"version {version}: epoch {version.epoch + 1} was opened; not published")
    _commit(store, manifest)
    return manifest


def _parts(tensors: Iterable[Tensor], seen: set[str]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"tensor {tensor.name!r} comes twice")
        seen.add(tensor.name)
        if part and size + tensor.num_bytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(tensor)
        size += tensor.num_bytes
    if part:
        yield part


def _put_part(store: Store, version: VersionId, index: int, part: list[Tensor]) -> FullObject:
    data = safetensors.encode(part)
    digest = blake3(data).hexdigest()
    # The key carries the content: a repeated or torn put can only write the same object again.
    key = f"{version.payload_prefix}{index:04d}-{digest[:16]}.safetensors"
    store.put(key, data)
    return FullObject(key=key, size=len(data), blake3=digest)


def _commit(store: Store, manifest: FullManifest) -> None:
    key = manifest.version.manifest_key
    data = manifest.to_bytes()
    try:
        store.create(key, data)
    except ExistsError:
        if store.get(key) != data:
            raise FencedError(
                f"{store.url}/{key}: published by another with other content"
            ) from None
    except StoreError:
        # A create that timed out may have taken effect.
        if _read_back(store, key) != data:
            raise


def _read_back(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except MissingError:
        return None


class Fetched(NamedTuple):
    """One payload object whose every byte was verified."""

    item: FullObject
    data: bytes
    tensors: list[Tensor]
    """Views into data."""


def fetch(store: Store, manifest: FullManifest) -> Iterator[Fetched]:
    """The payload objects of a version; each is hash-checked before a byte of it is used.

    Raises:
        CorruptError: an object is damaged, also when read again, or the tensors do not add up.
        MissingError: an object was pruned.
    """
    seen: set[str] = set()
    for item in manifest.objects:
        data = _fetch(store, item)
        tensors = safetensors.decode(data, where=f"{store.url}/{item.key}")
        for tensor in tensors:
            if tensor.name in seen:
                raise CorruptError(f"version {manifest.version}: tensor {tensor.name!r} twice")
            seen.add(tensor.name)
        yield Fetched(item, data, tensors)
    if len(seen) != manifest.tensors:
        raise CorruptError(
            f"version {manifest.version}: {len(seen)} tensors, the manifest says {manifest.tensors}"
        )


def _fetch(store: Store, item: FullObject) -> bytes:
    where = f"{store.url}/{item.key}"
    found = store.head(item.key)
    if found is None:
        raise MissingError(where)
    if found.size != item.size:
        raise CorruptError(f"{where}: {found.size} bytes, the manifest says {item.size}")
    for _ in range(2):  # damage on the way does not repeat, damage in the store does
        data = store.get(item.key)
        if blake3(data).hexdigest() == item.blake3:
            return data
    raise CorruptError(f"{where}: content does not match its BLAKE3 digest")
