"""A whole copy of one version in a folder, moved along the chain like any reader's.

The words of all tensors lie in one mapped file, so that a copy costs one model of disk and no
model of memory. A label file names the version; it is deleted before the first
word is written and written after the last, so that a killed process never leaves half a
version under a name.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from etude.common import atomic
from etude.common.blobs import RangeReader, Store
from etude.common.errors import CorruptError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.chain_view import ChainView
from etude.common.weights.protocol.manifest import Sha256, VersionRef, read_manifest
from etude.common.weights.protocol.plan import Edge, plan_path
from etude.common.weights.protocol.publication import read_schema_bytes
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.block_reader import stage
from etude.common.weights.replicas.live_weights import (
    LiveWeights,
    PreparedPatches,
    identity_regions,
)
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.digest import Digest
from etude.common.weights.tensors.schema import Schema, parse_schema
from etude.common.weights.tensors.words import Words, word_type

BATCH_WORDS = 64 << 20
"""Words that are prepared at a time where nothing needs to be undone."""

MAX_MODEL_BYTES = 1 << 44
"""About the largest file that ext4 has; the largest models take a tenth."""

_ALIGNMENT = 64

Change = Callable[[Edge, PreparedPatches], None]
"""Called after each prepare of a delta or a skip, before anything is written."""


class _Label(BaseModel):
    model_config = records.STRICT

    ref: VersionRef
    schema_sha256: Sha256


class DamagedEdgeError(CorruptError):
    """One step of a way cannot be used."""

    def __init__(self, edge: Edge, cause: CorruptError) -> None:
        super().__init__(str(cause))
        self.edge = edge


class MirroredVersion(NamedTuple):
    """Content of a mirror while it is one version."""

    ref: VersionRef
    schema: Schema
    words: dict[str, Words]
    """By name of the tensor, in place: do not write. Values are [elements]."""


class _Mapped(NamedTuple):
    """The words of a model on disk, whatever they are."""

    schema: Schema
    words: dict[str, Words]
    live: LiveWeights


@dataclass(slots=True)
class Mirror:
    """One version, bit for bit, in checkpoint coordinates; of one process at a time."""

    store: Store
    folder: Path
    run: str | None = None
    """UID of the run that manifests must carry; None takes any."""
    ranges: RangeReader | None = None
    ref: VersionRef | None = field(default=None, init=False)
    """What the words are; None while they are nothing that was published."""
    _mapped: _Mapped | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    @property
    def schema(self) -> Schema | None:
        """Schema of the words; None before the first version."""
        return None if self._mapped is None else self._mapped.schema

    @property
    def tensor_words(self) -> dict[str, Words]:
        """The words of every tensor by name, in place: do not write. Values are [elements]."""
        return {} if self._mapped is None else self._mapped.words

    def current_version(self) -> MirroredVersion:
        """The version that the words are.

        Raises:
            ValueError: they are none yet.
        """
        if self.ref is None or self._mapped is None:
            raise ValueError(f"{self.folder} holds no version yet")
        return MirroredVersion(self.ref, self._mapped.schema, self._mapped.words)

    def move_to(
        self,
        version: VersionId,
        on_change: Change | None = None,
        *,
        avoid: Collection[str] = frozenset(),
        view: ChainView | None = None,
    ) -> list[Edge]:
        """Become a version, over the cheapest path; the old one stays if nothing can be read.

        Args:
            version: an accepted one.
            on_change: sees each delta before it is written.
            avoid: keys of objects that the way must not need.
            view: what the store holds, as the caller saw it; unset looks now.

        Returns:
            The edges of the path.

        Raises:
            MissingError: it is not published, or was collected.
            FencedError: it is not on the accepted chain.
            QuarantinedVersionError: it is refused for ever.
            CorruptError: damaged in the store.
            DamagedEdgeError: the same, or this copy is damaged; it names the step.
            StoreError: the store failed.
        """
        manifest = read_manifest(self.store, version)
        if self.run is not None and manifest.run != self.run:
            raise CorruptError(f"version {version} is of run {manifest.run}, not {self.run}")
        edges = plan_path(self.store, self.ref, version, avoid=avoid, view=view)
        for edge in edges:
            self.apply_edge(edge, on_change)
        if self.ref != manifest.ref:  # the same state under a newer name
            self._write_label(manifest.ref, manifest.schema_sha256)
        return edges

    def apply_edge(self, edge: Edge, on_change: Change | None = None) -> None:
        """Become an edge's target; the old version stays if the edge cannot be read.

        Raises:
            DamagedEdgeError: damaged in the store, or it does not lead from here to its target.
            MissingError: an object was collected.
            StoreError: the store failed.
        """
        try:
            mapped = self._mapped_for(edge)
            with self._staged(edge, mapped.schema) as blocks:
                if edge.base is None:
                    self._replace(mapped.live, edge, blocks)
                else:
                    self._change(mapped.live, edge, blocks, on_change)
        except CorruptError as cause:
            raise DamagedEdgeError(edge, cause) from cause

    def scan(self) -> Digest:
        """The state digest of the words as they are.

        Raises:
            ValueError: there are none yet.
        """
        if self._mapped is None:
            raise ValueError(f"{self.folder} holds no version yet")
        return self._mapped.live.scan()

    def predict_state(self, edge: Edge) -> Digest:
        """The state that an edge would lead to from here; nothing is written.

        Raises:
            CorruptError: damaged in the store, or of another model.
            MissingError: an object was collected.
            StoreError: the store failed.
            ValueError: there is no version to start from.
        """
        mapped = self._mapped
        if self.ref is None or mapped is None:
            raise ValueError(f"{self.folder} holds no version yet")
        if edge.schema_sha256 != mapped.schema.sha256:
            raise CorruptError(f"version {edge.target.version}: its {edge.kind} has another schema")
        state = Digest.parse(self.ref.state)
        with self._staged(edge, mapped.schema) as blocks:
            for batch in _batches(blocks):
                state = state.plus(mapped.live.prepare(batch).digest)
        return state

    def _mapped_for(self, edge: Edge) -> _Mapped:
        """The words, or room for those of another model."""
        if self._mapped is not None and self._mapped.schema.sha256 == edge.schema_sha256:
            return self._mapped
        # No name here holds the old words: mapped, they would take disk beside the new ones.
        data = read_schema_bytes(self.store, edge.schema_sha256)
        where = f"{self.store.url}: schema {edge.schema_sha256}"
        schema = parse_schema(data, sha256=edge.schema_sha256, where=where)
        return self._reshape(schema, f"version {edge.target.version} of {self.store.url}")

    @contextmanager
    def _staged(self, edge: Edge, schema: Schema) -> Iterator[list[StagedBlock]]:
        path = self.folder / "staged"
        try:
            stage(self.store, edge, schema, path, ranges=self.ranges)
            yield staged_file.read_staged(path)
        finally:
            path.unlink(missing_ok=True)

    def _replace(self, live: LiveWeights, edge: Edge, blocks: Sequence[StagedBlock]) -> None:
        """Take every word from the blocks, some at a time: there is nothing to go back to."""
        self._drop_label()
        for batch in _batches(blocks):
            live.write(live.prepare(batch))
        self._prove(live.scan(), edge)
        self._write_label(edge.target, edge.schema_sha256)

    def _change(
        self,
        live: LiveWeights,
        edge: Edge,
        blocks: Sequence[StagedBlock],
        on_change: Change | None,
    ) -> None:
        if self.ref is None or edge.base is None or self.ref.state != edge.base.state:
            raise CorruptError(f"version {edge.target.version} does not build on {self.ref}")
        prepared = live.prepare(blocks)
        self._prove(Digest.parse(self.ref.state).plus(prepared.digest), edge)
        if on_change is not None:
            on_change(edge, prepared)
        self._drop_label()
        if not live.write(prepared):
            raise CorruptError(f"{self.folder}: the words are not those of {edge.base.version}")
        self._write_label(edge.target, edge.schema_sha256)

    def _prove(self, state: Digest, edge: Edge) -> None:
        if state.hex() != edge.target.state:
            raise CorruptError(
                f"version {edge.target.version}: its {edge.kind} leads to state {state.hex()},"
                f" the manifest says {edge.target.state}"
            )

    def _resume(self) -> None:
        """Go on with what an earlier process left, if that is a whole version."""
        try:
            label = _Label.model_validate_json((self.folder / "label.json").read_bytes())
            schema_bytes = (self.folder / "schema.json").read_bytes()
            schema = parse_schema(schema_bytes, sha256=label.schema_sha256, where=str(self.folder))
            mapped = self._map(schema)
        except (OSError, ValueError, ValidationError, CorruptError):
            self._clear()
            return
        if mapped.live.scan().hex() != label.ref.state:
            self._clear()
            return
        self.ref = label.ref

    def _clear(self) -> None:
        self.ref, self._mapped = None, None
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _reshape(self, schema: Schema, whose: str) -> _Mapped:
        """Make room for every word.

        Raises:
            CorruptError: the schema says more than any model has.
            OSError: this machine has no room.
        """
        size = _word_offsets(schema)[-1]
        if size > MAX_MODEL_BYTES:
            raise CorruptError(f"{whose}: schema {schema.sha256} says {size} bytes of weights")
        self._clear()
        free = shutil.disk_usage(self.folder).free
        # A disk that is found full by a write into mapped memory ends the process: so all of it is
        # asked for at once, and not begun at all where there clearly is no room.
        if size > free:
            what = f"{whose} takes {size} bytes, {free} are free"
            raise OSError(errno.ENOSPC, what, str(self.folder))
        with (self.folder / "words").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        (self.folder / "schema.json").write_bytes(schema.to_bytes())
        return self._map(schema)

    def _map(self, schema: Schema) -> _Mapped:
        places = _word_offsets(schema)
        memory = np.memmap(self.folder / "words", np.uint8, "r+")
        if memory.size != places[-1]:
            raise CorruptError(f"{self.folder}: {memory.size} bytes of words, not {places[-1]}")
        words = {
            spec.name: memory[start : start + spec.num_bytes].view(word_type(spec.dtype))
            for spec, start in zip(schema.tensors, places, strict=False)
        }
        self._mapped = _Mapped(schema, words, LiveWeights(schema, words, identity_regions(schema)))
        return self._mapped

    def _drop_label(self) -> None:
        (self.folder / "label.json").unlink(missing_ok=True)
        self.ref = None

    def _write_label(self, ref: VersionRef, schema_sha256: str) -> None:
        label = _Label(ref=ref, schema_sha256=schema_sha256)
        atomic.write_text(self.folder / "label.json", json.dumps(label.model_dump(mode="json")))
        self.ref = ref


def _word_offsets(schema: Schema) -> list[int]:
    """Offset of each tensor's words in the file, then its size, which is never 0."""
    padded = (-(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT for spec in schema.tensors)
    *starts, size = accumulate(padded, initial=0)
    return [*starts, max(size, _ALIGNMENT)]


def _batches(blocks: Sequence[StagedBlock]) -> Iterator[list[StagedBlock]]:
    batch: list[StagedBlock] = []
    words = 0
    for block in blocks:
        batch.append(block)
        words += block.hi - block.lo
        if words >= BATCH_WORDS:
            yield batch
            batch, words = [], 0
    if batch:
        yield batch
