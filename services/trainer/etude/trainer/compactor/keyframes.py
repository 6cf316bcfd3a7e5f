"""Keyframes and skips, written from a local copy and verified before they become visible."""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.coding.container import Container
from etude.common.weights.protocol.folded import (
    Keyframe,
    Skip,
    publish_folded,
    publish_keyframe_part,
    publish_skip_part,
)
from etude.common.weights.protocol.manifest import PayloadObject, Stats, VersionRef
from etude.common.weights.replicas.mirror import Mirror
from etude.common.weights.tensors.digest import ZERO, Digest
from etude.common.weights.tensors.schema import Schema
from etude.common.weights.tensors.tiles import tiling
from etude.trainer.compactor import parts
from etude.trainer.compactor.folding import FoldWindow
from etude.trainer.compactor.parts import Portion
from etude.trainer.compactor.report import FoldedWrite
from etude.trainer.export.delta_packer import PackedContainer, Packer, shard_words
from etude.trainer.export.receipts import sum_stats

_BYTES_PER_CHANGE = 4
"""More than a coded change takes, on top of the word itself."""


class _Copy(NamedTuple):
    """The local copy at one version."""

    mirror: Mirror
    ref: VersionRef
    schema: Schema


Upload = Callable[[int, bytes], str]
"""Stores one part under its number; returns its key."""


def write_keyframe(
    store: Store, run: str, mirror: Mirror, *, part_bytes: int = parts.PART_BYTES
) -> FoldedWrite:
    """Write the copy as a keyframe.

    Raises:
        CorruptError: the copy is damaged, and must be dropped; nothing became visible.
        StoreError: the store failed; call again.
    """
    started = time.monotonic()
    copy = _require_version(mirror)
    if mirror.scan().hex() != copy.ref.state:
        raise CorruptError(f"{mirror.folder}: the words are not those of {copy.ref.version}")
    sizes = [spec.num_bytes for spec in copy.schema.tensors]
    packed = (
        _pack_complete(copy, part)
        for part in parts.split_parts(copy.schema, sizes, part_bytes=part_bytes)
    )
    version = copy.ref.version
    stored = _upload_parts(
        packed, lambda part, data: publish_keyframe_part(store, version, part, data)
    )
    if stored.change.hex() != copy.ref.state:
        raise CorruptError(f"{mirror.folder}: the words changed while {version} was packed")
    record = Keyframe(
        run=run,
        target=copy.ref,
        schema_sha256=copy.schema.sha256,
        objects=stored.objects,
        stats=stored.stats,
    )
    publish_folded(store, record)
    return FoldedWrite("keyframe", version, stored.stats.num_bytes, time.monotonic() - started)


def write_skip(
    store: Store,
    run: str,
    mirror: Mirror,
    window: FoldWindow,
    *,
    codec: Codec = Codec.L1,
    part_bytes: int = parts.PART_BYTES,
) -> FoldedWrite | None:
    """Write one delta from a window's base to the copy; None if there is no difference.

    Raises:
        CorruptError: the delta does not lead to the copy; nothing became visible.
        StoreError: the store failed.
    """
    started = time.monotonic()
    copy, base = _require_version(mirror), window.base
    if base.state == copy.ref.state or window.schema.sha256 != copy.schema.sha256:
        return None
    packed = (
        _pack_changes(copy, part, window, codec)
        for part in parts.split_parts(copy.schema, _estimate_sizes(window), part_bytes=part_bytes)
    )
    spans = (base.version, copy.ref.version)
    stored = _upload_parts(packed, lambda part, data: publish_skip_part(store, *spans, part, data))
    if Digest.parse(base.state).plus(stored.change).hex() != copy.ref.state:
        raise CorruptError(f"{mirror.folder}: {spans[0]} with the changes is not {spans[1]}")
    record = Skip(
        run=run,
        base=base,
        target=copy.ref,
        schema_sha256=copy.schema.sha256,
        objects=stored.objects,
        stats=stored.stats,
    )
    publish_folded(store, record)
    return FoldedWrite("skip", spans[1], stored.stats.num_bytes, time.monotonic() - started)


def _require_version(mirror: Mirror) -> _Copy:
    if mirror.ref is None or mirror.schema is None:
        raise CorruptError(f"{mirror.folder} holds no version")
    return _Copy(mirror, mirror.ref, mirror.schema)


def _estimate_sizes(window: FoldWindow) -> list[int]:
    """Upper bound of the bytes that each tensor adds to a skip."""
    sizes = []
    for spec, count in zip(window.schema.tensors, window.touched_counts, strict=True):
        word_bytes = spec.num_bytes // max(1, spec.elements)
        sizes.append(min(spec.num_bytes, count * (word_bytes + _BYTES_PER_CHANGE)))
    return sizes


def _pack_complete(copy: _Copy, part: list[Portion]) -> PackedContainer:
    with Packer(copy.schema, codec=Codec.DENSE, threads=1) as packer:
        for tensor, shard in part:
            words = np.asarray(copy.mirror.tensor_words[copy.schema.tensors[tensor].name])
            packer.add_complete(tensor, words[shard.start : shard.stop], shard)
        return packer.finish()


def _pack_changes(
    copy: _Copy, part: list[Portion], window: FoldWindow, codec: Codec
) -> PackedContainer:
    with Packer(copy.schema, codec=codec, threads=1) as packer:
        for tensor, shard in part:
            spec = copy.schema.tensors[tensor]
            words = np.asarray(copy.mirror.tensor_words[spec.name])
            flat, old = window.touched_in(tensor, shard)
            new = words[flat]
            differs = old != new
            packer.add_changes(
                tensor=tensor,
                flat=flat[differs],
                old=old[differs],
                new=new[differs],
                shard=shard,
                block_words=shard_words(
                    words[shard.start : shard.stop], shard, tiling(spec, copy.schema.grid)
                ),
            )
        return packer.finish()


class _StoredParts(NamedTuple):
    objects: tuple[PayloadObject, ...]
    change: Digest
    stats: Stats


def _upload_parts(packed: Iterator[PackedContainer], upload: Upload) -> _StoredParts:
    """Upload one part after the other; only one is in memory at a time."""
    objects: list[PayloadObject] = []
    figures: list[Stats] = []
    change = ZERO
    for each in packed:
        change = change.plus(each.digest)
        figures.append(Stats(**each.stats._asdict()))
        if each.container.blocks:
            objects.append(_upload_object(len(objects), each.container, upload))
    return _StoredParts(tuple(objects), change, sum_stats(figures))


def _upload_object(part: int, container: Container, upload: Upload) -> PayloadObject:
    return PayloadObject(
        rank=part,
        key=upload(part, container.data),
        size=container.size,
        index_offset=container.index_offset,
        index_length=container.index_length,
        index_sha256=container.index_sha256,
    )
