"""Staging of versions on local disk, verified, with prefetch of the next update steps."""

import asyncio
import contextlib
import shutil
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from etude.common import atomic, weights
from etude.common.blobs import Store
from etude.common.errors import CorruptError, UnavailableError, crossing
from etude.common.weights import Edge, VersionId, WeightManifest
from etude.common.weights.coding.codecs.ids import Codec
from etude.common.weights.replicas import block_reader, staged_file
from etude.common.weights.replicas.block_selection import BlockSelector, select_all
from etude.common.weights.replicas.delta_folding import fold_deltas
from etude.common.weights.replicas.mirror import DamagedEdgeError, Mirror, MirroredVersion
from etude.common.weights.replicas.staged_file import StagedBlock
from etude.common.weights.tensors.schema import Schema, TensorSpec, parse_schema
from etude.common.weights.tensors.tiles import Tiling, tiling
from etude.common.weights.tensors.words import Words
from etude.inference import metrics
from etude.inference.updates.update_steps import UpdateStep


def stage_path_end(
    edges: Sequence[Edge], mirror: Mirror, path: Path, tensors: Collection[int]
) -> None:
    """Apply a path to a copy of the model on disk, and stage the result.

    Args:
        edges: the path; the first one is complete.
        mirror: a complete copy of the model.
        path: of the file for the workers.
        tensors: schema indices of the tensors that this engine holds elements of.

    Raises:
        DamagedEdgeError: a step is damaged in the store, or leads to another state.
        MissingError: an object was collected.
        StoreError: the store failed.
    """
    for edge in edges:
        mirror.apply_edge(edge)
    staged_file.write_blocks(path, _complete(mirror.current_version(), tensors))


def _complete(whole: MirroredVersion, tensors: Collection[int]) -> Iterator[StagedBlock]:
    for tensor, spec in enumerate(whole.schema.tensors):
        if tensor in tensors and spec.elements:
            cut = tiling(spec, whole.schema.grid)
            for number, data in enumerate(_tiles(whole.words[spec.name], spec, cut)):
                yield StagedBlock(tensor, number, 0, data.size, Codec.DENSE, None, data)


def _tiles(words: Words, spec: TensorSpec, cut: Tiling) -> Iterator[Words]:
    """The words of each tile, in its own order."""
    planes = words[: spec.elements].reshape(cut.planes, cut.rows, cut.columns)
    for number in range(cut.tiles):
        tile = cut.tile(number)
        rows = slice(tile.row, tile.row + tile.rows)
        columns = slice(tile.column, tile.column + tile.columns)
        yield planes[tile.plane, rows, columns].reshape(-1)


UNPACKED = 5
"""Bytes on disk per byte in the store: indices of 4 bytes were packed into less than one."""
PREFETCHED_STEPS = 2
"""Steps staged before their turn: each takes disk, and an earlier one may be damaged."""


@dataclass(slots=True)
class Stager:
    """Fetches from one run's store into a scratch folder; every method blocks."""

    store: Store
    run: str
    """UID that manifests must carry."""
    scratch: Path

    def read_manifest(self, version: VersionId) -> WeightManifest:
        """The manifest of a version of this run.

        Raises:
            CorruptError: it is damaged, or of another run.
            MissingError: it is not published, or deleted.
        """
        manifest = weights.read_manifest(self.store, version)
        self._check_run(manifest)
        return manifest

    def read_schema(self, sha256: str) -> Schema:
        """Read the schema of a version's tensors.

        Raises:
            CorruptError: it is damaged.
            MissingError: it was never stored.
        """
        data = weights.read_schema_bytes(self.store, sha256)
        return parse_schema(data, sha256=sha256, where=f"{self.store.url}: schema {sha256}")

    def stage_blocks(self, edge: Edge, schema: Schema, wanted: BlockSelector = select_all) -> Path:
        """Fetch and decode the blocks that lead to an edge's target.

        Args:
            edge: what to stage.
            schema: of its target.
            wanted: the blocks that ranks of this engine hold elements of.

        Raises:
            CorruptError: a block is damaged, also when read again.
            MissingError: an object was deleted.
            UnavailableError: the scratch folder is full; the text says how much is needed.
        """
        with self._staging_path(edge) as path:
            num_bytes = block_reader.stage(self.store, edge, schema, path, wanted)
        metrics.WEIGHTS_BYTES.labels(edge.kind, "blocks").inc(num_bytes)
        return path

    def stage_merged(self, step: UpdateStep, tensors: Collection[int]) -> Path:
        """Apply all parts of a step to a copy of the whole model on disk; stage the result.

        Args:
            step: of several parts; the first one is complete.
            tensors: schema indices of the tensors that this engine holds elements of.

        Raises:
            DamagedEdgeError: a part is damaged.
            MissingError: an object was deleted.
            UnavailableError: the scratch folder is full: it needs room for two models.
        """
        copy = self.scratch / "staged" / "copy"
        with self._staging_path(step.edge) as path:
            _remove(copy)
            try:
                stage_path_end(step.parts, Mirror(self.store, copy), path, tensors)
            finally:
                _remove(copy)
        for part in step.parts:
            metrics.WEIGHTS_BYTES.labels(part.kind, "blocks").inc(part.num_bytes)
        return path

    def stage_folded(self, step: UpdateStep, schema: Schema, wanted: BlockSelector) -> Path:
        """Fold the deltas of a step's parts into one, and stage it.

        Args:
            step: of several parts, each a delta or a skip on the one before.
            schema: of all of them.
            wanted: the blocks that ranks of this engine hold elements of.

        Raises:
            UnfoldableError: the codec of the run does not allow it.
            DamagedEdgeError: a part is damaged.
            MissingError: an object was deleted.
            UnavailableError: the scratch folder is full.
        """
        with self._staging_path(step.edge) as path, contextlib.ExitStack() as removing:
            versions = []
            for number, part in enumerate(step.parts):
                beside = path.with_name(f"{path.name}-part-{number}")
                removing.callback(_remove, beside)
                try:
                    num_bytes = block_reader.stage(self.store, part, schema, beside, wanted)
                except CorruptError as cause:
                    raise DamagedEdgeError(part, cause) from cause
                metrics.WEIGHTS_BYTES.labels(part.kind, "blocks").inc(num_bytes)
                versions.append(staged_file.read_staged(beside))
            staged_file.write_blocks(path, fold_deltas(versions, schema))
        return path

    @contextlib.contextmanager
    def _staging_path(self, edge: Edge) -> Iterator[Path]:
        """Empty path to stage an edge's target at; removed again after a failure."""
        target = edge.target.version
        path = self._path(target)
        try:
            with crossing(
                UnavailableError, f"cannot stage version {target}: {self._describe_space(edge)}"
            ):
                _remove(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                yield path
        except Exception as error:
            # A partial file takes the room that the next attempt needs.
            _release_frames(error)
            with contextlib.suppress(OSError):
                atomic.partial_path(path).unlink(missing_ok=True)
            raise

    def _describe_space(self, edge: Edge) -> str:
        """Disk space that a step needs, about, and the space that is free."""
        folder = next((p for p in (self.scratch, *self.scratch.parents) if p.is_dir()), None)
        free = shutil.disk_usage(folder).free >> 20 if folder else 0
        needed = edge.num_bytes * UNPACKED >> 20
        return f"it needs about {needed} MiB in {self.scratch}, {free} MiB are free"

    def keep_only(self, *kept: VersionId) -> None:
        """Remove all staged versions but these."""
        folder = self.scratch / "staged"
        names = {self._path(version) for version in kept}
        names |= {atomic.partial_path(path) for path in names}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path not in names:
                _remove(path)

    def _path(self, version: VersionId) -> Path:
        return self.scratch / "staged" / f"{version.epoch}-{version.number}"

    def _check_run(self, manifest: WeightManifest) -> None:
        if manifest.run != self.run:
            raise CorruptError(
                f"version {manifest.version} is of run {manifest.run}, not {self.run}"
            )


def _release_frames(error: BaseException | None) -> None:
    """Free the locals of an error's frames: a file mapped there takes disk even when removed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@dataclass(slots=True)
class Prefetcher:
    """Stages update steps in order, one at a time; a failure is raised at the step's turn."""

    _pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="stage-weights")
    )
    _steps: Sequence[UpdateStep] = ()
    _turn: int = 0
    _staged: "dict[int, Future[Path]]" = field(default_factory=dict)

    @contextlib.contextmanager
    def prefetching(self, steps: Sequence[UpdateStep]) -> Iterator[None]:
        """Prefetch these steps; downloads that have not started at the end are cancelled."""
        self._steps, self._staged = steps, {}
        try:
            yield
        finally:
            for future in self._staged.values():
                future.cancel()
            self._steps, self._staged = (), {}

    async def wait_staged(self, number: int, stage: Callable[[UpdateStep], Path]) -> Path:
        """The staged file of a step; downloads of the next ones are queued first.

        Raises:
            EtudeError: staging the step failed; see the function.
        """
        self._turn = number
        for each in range(number, min(number + 1 + PREFETCHED_STEPS, len(self._steps))):
            if each not in self._staged:
                self._staged[each] = self._pool.submit(stage, self._steps[each])
        return await asyncio.wrap_future(self._staged[number])

    def pending_versions(self) -> list[VersionId]:
        """Targets of the steps that are staged, or being staged, before their turn."""
        return [self._steps[each].edge.target.version for each in self._staged if each > self._turn]
