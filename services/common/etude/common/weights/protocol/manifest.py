"""The manifest: the create-only object that commits a version, and names what it builds on."""

import hashlib
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints, model_validator

from etude.common.blobs import Store
from etude.common.errors import CorruptError, StoreError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.versions import MAX_EPOCH, MAX_NUMBER, VersionId, parse_delta_key

MAX_RANKS = 10_000
MAX_OBJECT_BYTES = 1 << 44

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Hexadecimal."""
State = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
"""Digest of all weights: both lanes, hexadecimal."""
Name = Annotated[str, StringConstraints(max_length=256)]
Count = Annotated[int, Field(ge=0, le=1 << 56)]


class VersionRef(BaseModel):
    """A version together with what proves it: the chain is a chain of these."""

    model_config = records.STRICT

    epoch: int = Field(ge=1, le=MAX_EPOCH)
    number: int = Field(ge=0, le=MAX_NUMBER)
    manifest_sha256: Sha256
    state: State

    @property
    def version(self) -> VersionId:
        return VersionId(self.epoch, self.number)


class PayloadObject(BaseModel):
    """One container, and where its index lies."""

    model_config = records.STRICT

    rank: int = Field(ge=0, lt=MAX_RANKS)
    """Of the publisher; of a skip or a keyframe, the place among its parts."""
    key: Name
    size: int = Field(ge=1, le=MAX_OBJECT_BYTES)
    """In bytes."""
    index_offset: int = Field(ge=0, le=MAX_OBJECT_BYTES)
    index_length: int = Field(ge=1, le=MAX_OBJECT_BYTES)
    index_sha256: Sha256

    @model_validator(mode="after")
    def _inside(self) -> "PayloadObject":
        if self.index_offset + self.index_length > self.size:
            raise ValueError(f"the index ends past the {self.size} bytes of {self.key!r}")
        return self


class Stats(BaseModel):
    """Statistics of a version's changes, for people and metrics."""

    model_config = records.STRICT

    changed: Count
    elements: Count
    one_ulp: Count
    """Changes to a neighbouring number."""
    nonfinite: Count
    codecs: dict[Name, Count] = Field(max_length=64)
    """Blocks by codec."""
    num_bytes: Count
    """Size of all payloads."""


Objects = Annotated[tuple[PayloadObject, ...], Field(max_length=MAX_RANKS)]


class WeightManifest(BaseModel):
    """Objects that turn the base into a version; a version exists once its manifest does."""

    model_config = records.STRICT

    format: Literal[2] = 2
    run: Name
    """UID of the run, so that a store mix-up is noticed."""
    epoch: int = Field(ge=1, le=MAX_EPOCH)
    number: int = Field(ge=0, le=MAX_NUMBER)
    step: Count
    """Optimiser steps of the run that led here."""
    holder: Name
    base: VersionRef | None
    """None: every element is in the objects."""
    schema_sha256: Sha256
    state: State
    """After this version."""
    objects: Objects
    """By rank; none if nothing changed."""
    stats: Stats

    @model_validator(mode="after")
    def _consistent(self) -> "WeightManifest":
        if self.base is None and not self.objects:
            raise ValueError("objects: a complete version without objects")
        ref = self.base
        if ref is not None and not (ref.epoch <= self.epoch and ref.number < self.number):
            raise ValueError(f"base: {ref.version} is not before {self.version}")
        check_ranks(self.objects)
        for item in self.objects:
            said = parse_delta_key(item.key)
            if said != (self.version, item.rank, self.is_complete):
                raise ValueError(f"objects: key {item.key!r} is outside the version's prefix")
        return self

    @property
    def version(self) -> VersionId:
        return VersionId(self.epoch, self.number)

    @property
    def is_complete(self) -> bool:
        """True if it can be applied to any state."""
        return self.base is None

    @property
    def num_bytes(self) -> int:
        return sum(item.size for item in self.objects)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the stored manifest, hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def ref(self) -> VersionRef:
        """Reference that the next version names as its base."""
        return VersionRef(
            epoch=self.epoch,
            number=self.number,
            manifest_sha256=self.sha256,
            state=self.state,
        )

    def to_bytes(self) -> bytes:
        """The manifest as it is stored; equal manifests give equal bytes."""
        return records.to_bytes(self)


def check_ranks(objects: tuple[PayloadObject, ...]) -> None:
    """Refuse objects that are not sorted by rank, each once.

    Raises:
        ValueError: they are not.
    """
    ranks = [item.rank for item in objects]
    if ranks != sorted(set(ranks)):
        raise ValueError("objects: ranks are not sorted, each once")


def payload_sha16(data: bytes) -> str:
    """Digest of a payload in its key: a repeated put writes the same object."""
    return hashlib.sha256(data).hexdigest()[:16]


def check_stored(store: Store, objects: tuple[PayloadObject, ...]) -> None:
    """Refuse to name payloads that the store does not have in full.

    Raises:
        StoreError: naming the first.
    """
    for item in objects:
        found = store.head(item.key)
        if found is None or found.size != item.size:
            size = "no" if found is None else found.size
            raise StoreError(f"{store.url}/{item.key}: has {size} bytes instead of {item.size}")


def parse_manifest(data: bytes, *, version: VersionId, where: str) -> WeightManifest:
    """The manifest of this very version, every field checked.

    Raises:
        CorruptError: damaged, of another version, or naming keys outside its own prefix.
    """
    manifest = records.parse(WeightManifest, data, where=where)
    if manifest.version != version:
        raise CorruptError(f"{where}: the manifest is of version {manifest.version}")
    return manifest


def read_manifest(store: Store, version: VersionId) -> WeightManifest:
    """The manifest of a published version.

    Raises:
        MissingError: no such version was published, or it was deleted.
        CorruptError: the manifest is damaged.
    """
    key = version.manifest_key
    return parse_manifest(records.fetch(store, key), version=version, where=f"{store.url}/{key}")
