"""The manifest of a version that is published whole, one tensor after the other."""

import hashlib
import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.blobs import Store
from etude.common.errors import CorruptError
from etude.common.weights.protocol import sealed
from etude.common.weights.protocol.versions import MAX_EPOCH, MAX_NUMBER, VersionId

_PART = re.compile(r"[0-9]{4}-[0-9a-f]{16}\.safetensors")


class FullObject(BaseModel):
    """One payload object of a version."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str = Field(max_length=256)
    size: int = Field(ge=8, le=1 << 44)
    """In bytes."""
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")


class FullManifest(BaseModel):
    """What a policy version consists of; a version exists once its manifest does."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    run: str = Field(max_length=256)
    """UID of the run, so that a store mix-up is noticed."""
    epoch: int = Field(ge=1, le=MAX_EPOCH)
    number: int = Field(ge=0, le=MAX_NUMBER)
    step: int = Field(ge=0)
    """Optimiser steps of the run that led here."""
    holder: str = Field(max_length=256)
    tensors: int = Field(ge=1)
    """How many, over all objects."""
    objects: list[FullObject] = Field(min_length=1)

    @property
    def version(self) -> VersionId:
        """Its identity."""
        return VersionId(self.epoch, self.number)

    @property
    def num_bytes(self) -> int:
        """Size of all payload objects."""
        return sum(item.size for item in self.objects)

    @property
    def sha256(self) -> bytes:
        """SHA-256 of the stored manifest."""
        return hashlib.sha256(self.to_bytes()).digest()

    def to_bytes(self) -> bytes:
        """The manifest as it is stored; equal manifests give equal bytes."""
        return sealed.seal(self.model_dump())


def parse_full_manifest(data: bytes, *, version: VersionId, where: str) -> FullManifest:
    """The manifest of this very version, every field checked.

    Raises:
        CorruptError: damaged, of another version, or naming keys outside its own prefix.
    """
    try:
        manifest = FullManifest.model_validate(sealed.unseal(data, where=where))
    except ValidationError as cause:
        raise CorruptError(f"{where}: {cause}") from cause
    if manifest.version != version:
        raise CorruptError(f"{where}: the manifest is of version {manifest.version}")
    keys = [item.key for item in manifest.objects]
    for key in keys:
        part = key.removeprefix(version.payload_prefix)
        if part == key or not _PART.fullmatch(part):
            raise CorruptError(f"{where}: objects: key {key!r} is outside the version's prefix")
    if len(set(keys)) != len(keys):
        raise CorruptError(f"{where}: objects: the same key twice")
    return manifest


def read_full_manifest(store: Store, version: VersionId) -> FullManifest:
    """The manifest of a published version.

    Raises:
        MissingError: no such version was published, or it was pruned.
        CorruptError: the manifest is damaged.
    """
    key = version.manifest_key
    return parse_full_manifest(store.get(key), version=version, where=f"{store.url}/{key}")


def is_full(store: Store, version: VersionId) -> bool:
    """Whether a version was published whole, one tensor after the other."""
    return next(iter(store.list(version.payload_prefix)), None) is not None
