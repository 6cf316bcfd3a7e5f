"""The newest version of a real run, and the one it was built on, read as a replica would."""

import tempfile
from pathlib import Path

import numpy as np

from etude.common.blobs import MissingError, Store, open_store
from etude.common.errors import CorruptError
from etude.common.weights.protocol.chain import accepted_chain
from etude.common.weights.protocol.manifest import VersionRef, read_manifest
from etude.common.weights.protocol.plan import Edge, plan_path
from etude.common.weights.protocol.versions import VersionId, schema_key
from etude.common.weights.replicas import staged_file
from etude.common.weights.replicas.block_reader import stage
from etude.common.weights.replicas.live_weights import LiveWeights, identity_regions
from etude.common.weights.tensors.schema import Schema, parse_schema
from etude.common.weights.tensors.words import Words, word_type
from weights_bench.contender import copies
from weights_bench.trajectory import Trajectory


def newest_step(run: Path) -> Trajectory:
    """The last delta of a run's accepted chain.

    Args:
        run: what its storage.uri names, as a folder.

    Raises:
        MissingError: no version of the run was published as a delta, or its base is gone.
        CorruptError: what the store holds does not lead to the published state.
    """
    store = open_store(f"file://{run.resolve()}")
    for version in reversed(accepted_chain(store)):
        manifest = read_manifest(store, version)
        if manifest.base is not None:
            break
    else:
        raise MissingError(f"{store.url}: no version is a delta")
    sha256 = manifest.schema_sha256
    where = f"{store.url}/{schema_key(sha256)}"
    schema = parse_schema(store.get(schema_key(sha256)), sha256=sha256, where=where)
    replica = _Replica(store, schema)
    replica.go(None, manifest.base.version)
    old = copies(replica.words)
    replica.go(manifest.base, version)
    facts = {"run": run.name, "version": str(version), "step": manifest.step}
    return Trajectory(
        name=f"C run {run.name}, {version}",
        schema=schema,
        old=old,
        new=replica.words,
        facts=facts,
    )


class _Replica:
    """Whole weights in memory that follow the store."""

    def __init__(self, store: Store, schema: Schema) -> None:
        self._store, self._schema = store, schema
        self.words: tuple[Words, ...] = tuple(
            np.zeros(spec.elements, word_type(spec.dtype)) for spec in schema.tensors
        )
        names = [spec.name for spec in schema.tensors]
        named = dict(zip(names, self.words, strict=True))
        self._live = LiveWeights(schema, named, identity_regions(schema))

    def go(self, live: VersionRef | None, target: VersionId) -> None:
        """Apply what leads to a version, and prove by a scan that it is reached."""
        edges = plan_path(self._store, live, target)
        with tempfile.TemporaryDirectory() as folder:
            for edge in edges:
                self._apply(edge, Path(folder) / "staged")

    def _apply(self, edge: Edge, path: Path) -> None:
        stage(self._store, edge, self._schema, path)
        self._live.write(self._live.prepare(staged_file.read_staged(path)))
        if self._live.scan().hex() != edge.target.state:
            raise CorruptError(f"{self._store.url}: not the state of {edge.target.version}")
