"""Checkpoints in the object store: a manifest written last, with the digest of every object.

checkpoints/<step:012d>/<epoch:06d>/learner/…        state of the learner
checkpoints/<step:012d>/<epoch:06d>/controller.json  state of the controller at the same step
checkpoints/<step:012d>/model/…                      Hugging Face folder, at the end of a phase
checkpoints/<step:012d>/manifest.json                written last: without it there is no checkpoint
"""

import hashlib
from collections.abc import Iterator
from typing import Literal, NamedTuple

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError

CHECKPOINTS = "checkpoints/"
MANIFEST = "manifest.json"

_READ_BYTES = 64 << 20
"""Objects are hashed in pieces of this size, so that a large one does not fill the memory."""

Reason = Literal["Scheduled", "Manual", "Suspend", "Failure", "PhaseEnd", "Final"]


class CheckpointObject(BaseModel):
    """One object of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(max_length=512)
    """Relative to the checkpoint's prefix."""
    size: int = Field(ge=0)
    """In bytes."""
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")


class CheckpointManifest(BaseModel):
    """What a checkpoint consists of; a checkpoint exists once its manifest does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    run: str
    """UID of the run, so that a store mix-up is noticed."""
    step: int = Field(ge=0)
    """Optimiser steps over all phases."""
    phase: str
    phase_step: int = Field(ge=0)
    """Optimiser steps of this phase."""
    epoch: int = Field(ge=1)
    policy_version: int = Field(ge=0)
    """Number of the newest version published from these weights."""
    reason: Reason
    objects: list[CheckpointObject] = Field(min_length=1)
    metrics: dict[str, str] = Field(default_factory=dict)
    """Figures of the run at this step, as text."""
    request: str = ""
    """UID of the Checkpoint object that asked for it; empty if none did."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(item.size for item in self.objects)


class StoredCheckpoint(NamedTuple):
    """A manifest and where it lies."""

    manifest: CheckpointManifest
    prefix: str
    """Ends with a slash."""
    digest: str
    """SHA-256 of the stored manifest."""


def prefix_of(step: int) -> str:
    """Where the checkpoint of a step lies."""
    return f"{CHECKPOINTS}{step:012d}/"


def described(store: Store, prefix: str, key: str) -> CheckpointObject:
    """Size and digest of an object as the store holds it.

    Raises:
        MissingError: it is not there.
    """
    info = store.head(prefix + key)
    if info is None:
        raise MissingError(f"{store.url}/{prefix}{key}: missing")
    hasher = blake3()
    for start in range(0, info.size, _READ_BYTES):
        hasher.update(store.get_range(prefix + key, start, min(_READ_BYTES, info.size - start)))
    return CheckpointObject(key=key, size=info.size, blake3=hasher.hexdigest())


def commit(store: Store, manifest: CheckpointManifest) -> StoredCheckpoint:
    """Make a checkpoint visible. Everything it names must be in the store already."""
    prefix = prefix_of(manifest.step)
    data = manifest.model_dump_json(indent=1).encode()
    store.put(prefix + MANIFEST, data)
    return StoredCheckpoint(manifest, prefix, hashlib.sha256(data).hexdigest())


def steps(store: Store) -> list[int]:
    """Steps that have a manifest, ascending."""
    found = []
    for info in store.list(CHECKPOINTS):
        folder, _, name = info.key.removeprefix(CHECKPOINTS).partition("/")
        if name == MANIFEST and folder.isascii() and folder.isdigit():
            found.append(int(folder))
    return sorted(found)


def read(store: Store, step: int, *, run: str | None = None) -> StoredCheckpoint:
    """The checkpoint of a step, its manifest checked and its objects not.

    Raises:
        MissingError: there is none.
        CorruptError: the manifest is damaged, or of another run or step.
    """
    prefix = prefix_of(step)
    where = f"{store.url}/{prefix}{MANIFEST}"
    data = store.get(prefix + MANIFEST)
    try:
        manifest = CheckpointManifest.model_validate_json(data)
    except ValidationError as cause:
        raise CorruptError(f"{where}: {cause}") from cause
    if manifest.step != step or (run is not None and manifest.run != run):
        raise CorruptError(f"{where}: is of step {manifest.step} of run {manifest.run}")
    return StoredCheckpoint(manifest, prefix, hashlib.sha256(data).hexdigest())


def find(store: Store, found: StoredCheckpoint) -> None:
    """Look for every object, with its size; their content is not read.

    Raises:
        CorruptError: an object is missing or of another size.
    """
    for item in found.manifest.objects:
        info = store.head(found.prefix + item.key)
        if info is None or info.size != item.size:
            where = f"{store.url}/{found.prefix}{item.key}"
            size = "is missing" if info is None else f"has {info.size} bytes, not {item.size}"
            raise CorruptError(f"{where}: {size}")


def verify(store: Store, found: StoredCheckpoint) -> None:
    """Read every object back and compare it with the manifest.

    Raises:
        CorruptError: an object is missing or differs.
    """
    for item in found.manifest.objects:
        where = f"{store.url}/{found.prefix}{item.key}"
        try:
            present = described(store, found.prefix, item.key)
        except MissingError as cause:
            raise CorruptError(f"{where}: is missing") from cause
        if present != item:
            raise CorruptError(f"{where}: does not match the manifest")


def newest_verified(store: Store, *, run: str, problems: list[str]) -> StoredCheckpoint | None:
    """The newest complete checkpoint; damaged ones are passed over and named in problems."""
    for step in reversed(steps(store)):
        try:
            found = read(store, step, run=run)
            verify(store, found)
        except CorruptError as error:
            problems.append(str(error))
        else:
            return found
    return None


def stored(store: Store, *, run: str) -> Iterator[StoredCheckpoint]:
    """Every checkpoint with a readable manifest, oldest first."""
    for step in steps(store):
        try:
            yield read(store, step, run=run)
        except CorruptError:  # newest_verified reports it
            continue


def delete(store: Store, step: int) -> None:
    """Remove a checkpoint: the manifest first, so that half of one is never visible."""
    prefix = prefix_of(step)
    store.delete([prefix + MANIFEST])
    store.delete([info.key for info in store.list(prefix)])
