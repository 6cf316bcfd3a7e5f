"""Versions on local disk, verified before the engine hears of them."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.common import weights
from etude.common.blobs import Store
from etude.common.errors import CorruptError, UnavailableError, crossing
from etude.common.weights import Edge, FullManifest, VersionId, WeightManifest, reading
from etude.common.weights.schema import Schema, parse_schema
from etude.inference.policy import StagedVersion


class Whole(NamedTuple):
    """A whole version, every byte verified."""

    manifest: FullManifest
    staged: StagedVersion


@dataclass(slots=True)
class Stager:
    """Fetches from one run's store into a scratch folder; every method may block."""

    store: Store
    run: str
    """UID that manifests must carry."""
    scratch: Path

    def whole(self, version: VersionId) -> Whole:
        """Fetch a whole version, one container after the other.

        Raises:
            CorruptError: it is damaged, or of another run.
            MissingError: it is not published, or pruned.
            UnavailableError: the scratch folder takes no more.
        """
        manifest = weights.read_full_manifest(self.store, version)
        self._check_run(manifest)
        with crossing(UnavailableError, f"cannot stage version {version}"):
            folder = self._place(version)
            folder.mkdir(parents=True)
            files: list[Path] = []
            for fetched in weights.fetch(self.store, manifest):
                path = folder / f"{len(files):04d}.safetensors"
                path.write_bytes(fetched.data)
                files.append(path)
        return Whole(manifest, StagedVersion(version=version, files=files))

    def manifest(self, version: VersionId) -> WeightManifest:
        """What a version of the chain of changes is.

        Raises:
            CorruptError: it is damaged, or of another run.
            MissingError: it is not published, or deleted.
        """
        manifest = weights.read_manifest(self.store, version)
        self._check_run(manifest)
        return manifest

    def schema(self, sha256: str) -> Schema:
        """The tensors that a version has.

        Raises:
            CorruptError: it is damaged.
            MissingError: it was never stored.
        """
        data = weights.read_schema_bytes(self.store, sha256)
        return parse_schema(data, sha256=sha256, where=f"{self.store.url}: schema {sha256}")

    def blocks(self, edge: Edge, schema: Schema) -> Path:
        """Fetch and decode what leads to an edge's target.

        Raises:
            CorruptError: a block is damaged, also when read again.
            MissingError: an object was deleted.
            UnavailableError: the scratch folder takes no more.
        """
        target = edge.target.version
        with crossing(UnavailableError, f"cannot stage version {target}"):
            path = self._place(target)
            path.parent.mkdir(parents=True, exist_ok=True)
            reading.stage(self.store, edge, schema, path)
        return path

    def keep_only(self, kept: VersionId | None) -> None:
        """Drop everything else that is staged."""
        folder = self.scratch / "staged"
        for path in folder.iterdir() if folder.is_dir() else ():
            if kept is None or path != self._path(kept):
                _remove(path)

    def _place(self, version: VersionId) -> Path:
        """Where to stage a version; nothing is there."""
        path = self._path(version)
        _remove(path)
        return path

    def _path(self, version: VersionId) -> Path:
        return self.scratch / "staged" / f"{version.epoch}-{version.number}"

    def _check_run(self, manifest: FullManifest | WeightManifest) -> None:
        if manifest.run != self.run:
            raise CorruptError(
                f"version {manifest.version} is of run {manifest.run}, not {self.run}"
            )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
