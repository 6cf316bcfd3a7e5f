"""Skips and keyframes: shorter ways to a version than one delta after the other."""

from typing import Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.manifest import (
    Name,
    Objects,
    Sha256,
    Stats,
    VersionRef,
    check_ranks,
    check_stored,
    payload_sha16,
)
from etude.common.weights.protocol.versions import (
    KeyframeKey,
    SkipKey,
    VersionId,
    keyframe_key,
    keyframe_part_key,
    parse_keyframe_key,
    parse_skip_key,
    skip_key,
    skip_part_key,
)


class Skip(BaseModel):
    """A delta folded over several versions."""

    model_config = records.STRICT

    format: Literal[1] = 1
    run: Name
    base: VersionRef
    target: VersionRef
    schema_sha256: Sha256
    objects: Objects
    stats: Stats

    @model_validator(mode="after")
    def _consistent(self) -> "Skip":
        if not (self.base.epoch <= self.target.epoch and self.base.number < self.target.number):
            raise ValueError(f"base: {self.base.version} is not before {self.target.version}")
        check_ranks(self.objects)
        for item in self.objects:
            said = parse_skip_key(item.key)
            if said != SkipKey(self.base.version, self.target.version, item.rank):
                raise ValueError(f"objects: key {item.key!r} is outside the skip's prefix")
        return self

    @property
    def key(self) -> str:
        return skip_key(self.base.version, self.target.version)


class Keyframe(BaseModel):
    """A whole version, which can be applied to anything."""

    model_config = records.STRICT

    format: Literal[1] = 1
    run: Name
    target: VersionRef
    schema_sha256: Sha256
    objects: Objects = Field(min_length=1)
    stats: Stats

    @model_validator(mode="after")
    def _consistent(self) -> "Keyframe":
        check_ranks(self.objects)
        for item in self.objects:
            if parse_keyframe_key(item.key) != KeyframeKey(self.target.version, item.rank):
                raise ValueError(f"objects: key {item.key!r} is outside the keyframe's prefix")
        return self

    @property
    def key(self) -> str:
        return keyframe_key(self.target.version)


_Folded = TypeVar("_Folded", Skip, Keyframe)


def publish_skip_part(
    store: Store, base: VersionId, target: VersionId, part: int, data: bytes
) -> str:
    """Upload one container of a skip; invisible until publish_folded(). Returns its key."""
    key = skip_part_key(base, target, part, payload_sha16(data))
    store.put(key, data)
    return key


def publish_keyframe_part(store: Store, version: VersionId, part: int, data: bytes) -> str:
    """Upload one container of a keyframe; invisible until publish_folded(). Returns its key."""
    key = keyframe_part_key(version, part, payload_sha16(data))
    store.put(key, data)
    return key


def publish_folded(store: Store, record: _Folded) -> _Folded:
    """Make a skip or a keyframe visible; of several writers the first one stays.

    Returns:
        What is in the store.

    Raises:
        StoreError: the store failed, or does not have every payload; call again.
        CorruptError: what is there is damaged.
    """
    check_stored(store, record.objects)
    data = records.to_bytes(record)
    found = records.create_once(store, record.key, data)
    if found == data:
        return record
    return records.parse(type(record), found, where=f"{store.url}/{record.key}")


def read_skip(store: Store, base: VersionId, target: VersionId) -> Skip:
    """The record of one skip.

    Raises:
        MissingError: there is none.
        CorruptError: it is damaged, or of other versions.
    """
    key = skip_key(base, target)
    found = records.parse(Skip, records.fetch(store, key), where=f"{store.url}/{key}")
    if found.key != key:
        raise CorruptError(f"{store.url}/{key}: the record is of {found.key}")
    return found


def read_keyframe(store: Store, version: VersionId) -> Keyframe:
    """The record of one keyframe.

    Raises:
        MissingError: there is none.
        CorruptError: it is damaged, or of another version.
    """
    key = keyframe_key(version)
    found = records.parse(Keyframe, records.fetch(store, key), where=f"{store.url}/{key}")
    if found.key != key:
        raise CorruptError(f"{store.url}/{key}: the record is of {found.key}")
    return found
