"""Checkpoints in the object store: a manifest written last, with the digest of every object.

checkpoints/<step:012d>/<epoch:06d>/<attempt:03d>/learner/…        state of the learner,
checkpoints/<step:012d>/<epoch:06d>/<attempt:03d>/controller.json  of the controller
checkpoints/<step:012d>/model/…                      Hugging Face folder, at the end of a phase
checkpoints/<step:012d>/adapter/…                    PEFT folder with it, of a run of adapters
checkpoints/<step:012d>/manifest.json                written last: without it there is no checkpoint

Each attempt of a controller has a folder of its own, so that no state which a manifest names is
ever overwritten. (Earlier releases wrote learner/… and controller.json right below the epoch.)
Exports have none: who loads a model names its folder without reading a manifest. Attempts at
one step export the same weights; where hardware does not repeat their bits, a controller that was
replaced while it exported can damage its successor's, which is noticed as any damage is.

A run that was rolled back to an older checkpoint saves under <step:012d>-<branch:03d>/ from then
on, so that nothing of what it left is overwritten.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.common.blobs import ExistsError, MissingError, Store
from etude.common.errors import CorruptError, FencedError

CHECKPOINTS = "checkpoints/"
MANIFEST = "manifest.json"
CONTROLLER = "controller.json"
MODEL = "model"
ADAPTER = "adapter"

_PLACE = re.compile(r"([0-9]{12})(?:-([0-9]{3,}))?")

_READ_BYTES = 16 << 20
"""Objects are hashed in pieces of this size, so that a large one does not fill the memory."""

_READS_AT_ONCE = 8
"""Objects that are hashed at the same time."""

Reason = Literal["Scheduled", "Manual", "Suspend", "Failure", "Window", "PhaseEnd", "Final"]


class CheckpointId(NamedTuple):
    """Identity of a checkpoint within its run; a greater one is newer within one branch."""

    branch: int
    """Number of rollbacks of the run before it was written."""
    step: int
    """Optimiser steps over all phases."""

    @property
    def prefix(self) -> str:
        branch = f"-{self.branch:03d}" if self.branch else ""
        return f"{CHECKPOINTS}{self.step:012d}{branch}/"


class CheckpointParent(BaseModel):
    """The checkpoint that a run went on from before it wrote the next one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=0)
    branch: int = Field(ge=0)
    digest: str
    """SHA-256 of its manifest."""


class CheckpointObject(BaseModel):
    """One object of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = Field(max_length=512)
    """Relative to the checkpoint's prefix."""
    size: int = Field(ge=0)
    """In bytes."""
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")


class CheckpointManifest(BaseModel):
    """Content of a checkpoint; a checkpoint exists once its manifest does."""

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
    branch: int = Field(default=0, ge=0)
    """Number of rollbacks of the run to an older checkpoint."""
    parent: CheckpointParent | None = None
    """Checkpoint that it continues; None for the first."""

    @property
    def checkpoint_id(self) -> CheckpointId:
        return CheckpointId(self.branch, self.step)

    @property
    def size_bytes(self) -> int:
        return sum(item.size for item in self.objects)

    @property
    def state_folder(self) -> str:
        """Folder with the states of learner and controller below the prefix; ends with a slash.

        Raises:
            CorruptError: there is no state of a controller, or more than one.
        """
        found = [each.key for each in self.objects if each.key.rpartition("/")[2] == CONTROLLER]
        if len(found) != 1 or "/" not in found[0]:
            raise CorruptError(f"step {self.step}: {len(found)} objects are named {CONTROLLER}")
        return found[0].removesuffix(CONTROLLER)


class StoredCheckpoint(NamedTuple):
    """A manifest and its location."""

    manifest: CheckpointManifest
    prefix: str
    """Ends with a slash."""
    digest: str
    """SHA-256 of the stored manifest."""


def describe_object(store: Store, prefix: str, key: str) -> CheckpointObject:
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


def write_manifest(store: Store, manifest: CheckpointManifest) -> StoredCheckpoint:
    """Make a checkpoint visible. Everything it names must be in the store already.

    A manifest of the same or of an earlier epoch is replaced.

    Raises:
        FencedError: the controller of a later epoch has saved this step.
    """
    prefix = manifest.checkpoint_id.prefix
    data = manifest.model_dump_json(indent=1).encode()
    try:
        store.create(prefix + MANIFEST, data)
    except ExistsError:
        if _epoch_of_manifest(store, prefix + MANIFEST) > manifest.epoch:
            where = f"{store.url}/{prefix}{MANIFEST}"
            raise FencedError(f"{where} is of a later epoch than {manifest.epoch}") from None
        store.put(prefix + MANIFEST, data)
    return StoredCheckpoint(manifest, prefix, hashlib.sha256(data).hexdigest())


def _epoch_of_manifest(store: Store, key: str) -> int:
    """Epoch of the controller that wrote a manifest; 0 for one that is damaged or gone."""
    try:
        return CheckpointManifest.model_validate_json(store.get(key)).epoch
    except (MissingError, ValidationError):
        return 0


def list_checkpoints(store: Store) -> list[CheckpointId]:
    """Checkpoints that have a manifest, ascending."""
    found = []
    for info in store.list(CHECKPOINTS):
        folder, _, name = info.key.removeprefix(CHECKPOINTS).partition("/")
        match = _PLACE.fullmatch(folder)
        if name == MANIFEST and match is not None:
            found.append(CheckpointId(int(match[2] or 0), int(match[1])))
    return sorted(found)


def list_unfinished(store: Store, *, epoch: int) -> list[str]:
    """Keys of what was written of checkpoints that never got their manifest.

    Exports are among them, which name no epoch: they may be deleted only while no later epoch was
    opened.

    Args:
        store: the run's store.
        epoch: of the caller, which writes no checkpoint now; states of later ones are left out.
    """
    listed: dict[str, list[str]] = {}
    for info in store.list(CHECKPOINTS):
        folder, _, name = info.key.removeprefix(CHECKPOINTS).partition("/")
        if _PLACE.fullmatch(folder):
            listed.setdefault(folder, []).append(name)
    return [
        f"{CHECKPOINTS}{folder}/{name}"
        for folder, names in listed.items()
        if MANIFEST not in names
        for name in names
        if is_exported(name) or 0 < epoch_of(name) <= epoch
    ]


def is_exported(key: str) -> bool:
    """True for an object of an exported model or adapter, by its key in a checkpoint."""
    return key.startswith((f"{MODEL}/", f"{ADAPTER}/"))


def epoch_of(key: str) -> int:
    """Epoch whose controller wrote an object of a checkpoint; 0 if its key names none."""
    folder = key.partition("/")[0]
    return int(folder) if folder.isdecimal() else 0


def read_checkpoint(
    store: Store, place: CheckpointId, *, run: str | None = None
) -> StoredCheckpoint:
    """One checkpoint, its manifest checked and its objects not.

    Raises:
        MissingError: there is none.
        CorruptError: the manifest is damaged, or of another run or step.
    """
    prefix = place.prefix
    where = f"{store.url}/{prefix}{MANIFEST}"
    data = store.get(prefix + MANIFEST)
    try:
        manifest = CheckpointManifest.model_validate_json(data)
    except ValidationError as cause:
        raise CorruptError(f"{where}: {cause}") from cause
    if manifest.checkpoint_id != place or (run is not None and manifest.run != run):
        raise CorruptError(f"{where}: is of step {manifest.step} of run {manifest.run}")
    return StoredCheckpoint(manifest, prefix, hashlib.sha256(data).hexdigest())


def check_sizes(store: Store, found: StoredCheckpoint) -> None:
    """Check that every object exists with its size; content is not read.

    Raises:
        CorruptError: an object is missing or of another size.
    """
    for item in found.manifest.objects:
        info = store.head(found.prefix + item.key)
        if info is None or info.size != item.size:
            where = f"{store.url}/{found.prefix}{item.key}"
            size = "is missing" if info is None else f"has {info.size} bytes, not {item.size}"
            raise CorruptError(f"{where}: {size}")


def check_digests(store: Store, found: StoredCheckpoint) -> None:
    """Read every object back and compare it with the manifest.

    Raises:
        CorruptError: an object is missing or differs.
    """
    objects = found.manifest.objects

    def describe(item: CheckpointObject) -> CheckpointObject | None:
        try:
            return describe_object(store, found.prefix, item.key)
        except MissingError:
            return None

    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        for item, present in zip(objects, pool.map(describe, objects), strict=True):
            if present != item:
                what = "is missing" if present is None else "does not match the manifest"
                raise CorruptError(f"{store.url}/{found.prefix}{item.key}: {what}")


def first_intact(
    store: Store, candidates: Sequence[CheckpointId], *, run: str, problems: list[str]
) -> StoredCheckpoint | None:
    """The first intact candidate; damaged ones are skipped and named in problems."""
    for place in candidates:
        try:
            found = read_checkpoint(store, place, run=run)
            check_digests(store, found)
        except CorruptError as error:
            problems.append(str(error))
        else:
            return found
    return None


def stored_checkpoints(store: Store, *, run: str) -> Iterator[StoredCheckpoint]:
    """Every checkpoint with a readable manifest, oldest first."""
    for place in list_checkpoints(store):
        try:
            yield read_checkpoint(store, place, run=run)
        except CorruptError:  # first_verified reports it
            continue


def complete_checkpoints(store: Store, *, run: str) -> list[StoredCheckpoint]:
    """Checkpoints of which every object is in the store with its size, oldest first.

    A controller that was replaced may still write a manifest after its successor deleted what it
    took for leftovers. That manifest was never acknowledged.
    """
    sizes = {info.key: info.size for info in store.list(CHECKPOINTS)}
    return [
        found
        for found in stored_checkpoints(store, run=run)
        if all(sizes.get(found.prefix + item.key) == item.size for item in found.manifest.objects)
    ]
