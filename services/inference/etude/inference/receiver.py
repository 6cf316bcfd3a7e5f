"""Follows the accepted chain: fetch, verify, stage, commit."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from opentelemetry import trace

from etude.common import weights
from etude.common.blobs import MissingError, Store
from etude.common.errors import (
    CorruptError,
    EtudeError,
    FencedError,
    UnavailableError,
    UnknownIdError,
    crossing,
)
from etude.common.weights import FullManifest, VersionId
from etude.inference import metrics
from etude.inference.policy import PolicyEngine, StagedVersion
from etude.v1 import weights_pb2

POLL_S = 1.0
"""How soon a version is found that nobody announced; a commit call finds it at once."""

MAX_BACKOFF_S = 60.0
"""Longest wait before a version that was refused is fetched again."""

_tracer = trace.get_tracer("etude.inference")


class State(Enum):
    """Where the replica stands with respect to the weights."""

    LOADING = weights_pb2.REPLICA_STATE_LOADING
    SERVING = weights_pb2.REPLICA_STATE_SERVING
    CATCHING_UP = weights_pb2.REPLICA_STATE_CATCHING_UP
    NOT_READY = weights_pb2.REPLICA_STATE_NOT_READY


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the replica serves and why, if it does not."""

    replica: str
    state: State = State.LOADING
    live: VersionId | None = None
    manifest_sha256: bytes = b""
    last_pause_s: float = 0.0
    last_commit_s: float = 0.0
    """Fetch, verify and commit."""
    reason: str = ""
    message: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether a verified version is being served."""
        return self.state in {State.SERVING, State.CATCHING_UP}

    def to_proto(self) -> weights_pb2.WeightStatus:
        """This status on the wire."""
        return weights_pb2.WeightStatus(
            replica=self.replica,
            state=self.state.value,
            live=self.live.to_proto() if self.live else None,
            manifest_sha256=self.manifest_sha256,
            last_pause_seconds=self.last_pause_s,
            last_commit_seconds=self.last_commit_s,
            reason=self.reason,
            message=self.message,
        )


@dataclass(slots=True, kw_only=True)
class Receiver:
    """Moves one engine along the chain; every version is verified before it touches a weight."""

    store: Store
    engine: PolicyEngine
    run: str
    """UID that manifests must carry."""
    scratch: Path
    status: Status
    _moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set and replaced at each change of status."""
    _failures: int = 0

    async def follow(self) -> None:
        """Commit every newer version, for ever; a refused one is tried again later.

        Raises:
            UnavailableError: the engine cannot go on.
        """
        while not self.engine.failed:
            with contextlib.suppress(EtudeError):  # in the status, which is what callers watch
                await self.catch_up()
            await asyncio.sleep(min(POLL_S * 2 ** min(self._failures, 10), MAX_BACKOFF_S))
        raise UnavailableError(f"engine: {self.engine.failed}")

    async def catch_up(self) -> None:
        """Commit the newest accepted version, if it is not live yet."""
        async with self._moving:
            with self._reported_here():
                newest = await asyncio.to_thread(weights.newest, self.store)
                if newest is None:
                    return
                self._observe_lag(newest)
                if newest != self.engine.live:
                    await self._move_to(newest)
                elif self.status.reason:
                    self._set(replace(self.status, state=State.SERVING, reason="", message=""))

    async def commit(self, version: VersionId) -> Status:
        """Make this version live, or leave the old one serving.

        A version at or below the live one on the accepted chain needs nothing done.

        Raises:
            UnknownIdError: no such version is published.
            FencedError: it is not on the accepted chain.
            CorruptError: it is damaged or does not fit the model.
            StoreError: the store failed.
        """
        async with self._moving:
            live = self.engine.live
            if version != live:
                with self._reported_here():
                    if not await self._is_behind(version, live):
                        await self._move_to(version)
            return self.status

    async def watch(self) -> AsyncIterator[Status]:
        """The present status, then the latest after each change."""
        while True:
            changed = self._changed
            yield self.status
            await changed.wait()

    async def _is_behind(self, version: VersionId, live: VersionId | None) -> bool:
        if live is None or version.number > live.number:
            return False
        chain = await asyncio.to_thread(weights.accepted_chain, self.store)
        return version in chain and live in chain

    async def _move_to(self, version: VersionId) -> None:
        began = time.perf_counter()
        if self.status.is_ready:
            self._set(replace(self.status, state=State.CATCHING_UP))
        with _tracer.start_as_current_span("stage", attributes=_attributes(version)):
            manifest, staged = await asyncio.to_thread(self._stage, version)
        metrics.WEIGHTS_STAGE_SECONDS.observe(time.perf_counter() - began)
        metrics.WEIGHTS_BYTES.labels("full", "none").inc(manifest.num_bytes)
        # The manifest was read before this question: a fenced publisher cannot slip in between.
        if not await asyncio.to_thread(weights.is_accepted, self.store, version):
            raise FencedError(f"version {version} is not on the accepted chain")
        committing = time.perf_counter()
        with _tracer.start_as_current_span("commit", attributes=_attributes(version)):
            pause_s = await self.engine.commit(staged)
        metrics.WEIGHTS_COMMIT_SECONDS.observe(time.perf_counter() - committing)
        metrics.WEIGHTS_PAUSE_SECONDS.observe(pause_s)
        self._failures = 0
        self._set(
            Status(
                replica=self.status.replica,
                state=State.SERVING,
                live=version,
                manifest_sha256=manifest.sha256,
                last_pause_s=pause_s,
                last_commit_s=time.perf_counter() - began,
            )
        )
        self._observe_lag(version)
        await asyncio.to_thread(self._sweep, version)

    def _stage(self, version: VersionId) -> tuple[FullManifest, StagedVersion]:
        """Fetch and verify into files; runs on a thread.

        Raises:
            UnknownIdError: it is not published, or pruned.
            CorruptError: it is damaged, or of another run.
            UnavailableError: the scratch folder takes no more.
        """
        try:
            manifest = weights.read_full_manifest(self.store, version)
            if manifest.run != self.run:
                raise CorruptError(f"version {version} is of run {manifest.run}, not {self.run}")
            with crossing(UnavailableError, f"cannot stage version {version}"):
                files = self._write(manifest)
        except MissingError as cause:
            raise UnknownIdError(f"version {version}: {cause} is not in the store") from cause
        return manifest, StagedVersion(version=version, files=files)

    def _write(self, manifest: FullManifest) -> list[Path]:
        folder = self._folder(manifest.version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        files: list[Path] = []
        for fetched in weights.fetch(self.store, manifest):
            path = folder / f"{len(files):04d}.safetensors"
            path.write_bytes(fetched.data)
            files.append(path)
        return files

    def _folder(self, version: VersionId) -> Path:
        return self.scratch / "staged" / f"{version.epoch}-{version.number}"

    def _sweep(self, live: VersionId) -> None:
        """Drop what is staged, except the live version, which is the undo of the next commit."""
        for folder in self._folder(live).parent.iterdir():
            if folder != self._folder(live):
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def _reported_here(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            self._failures += 1
            if isinstance(error, CorruptError):
                metrics.WEIGHTS_CORRUPT.inc()
            state = State.CATCHING_UP if self.engine.live else State.NOT_READY
            if self.engine.failed:
                state = State.NOT_READY
            self._set(replace(self.status, state=state, reason=error.reason, message=str(error)))
            raise

    def _set(self, status: Status) -> None:
        self.status = status
        self._changed.set()
        self._changed = asyncio.Event()

    def _observe_lag(self, newest: VersionId) -> None:
        live = self.engine.live
        if live is not None:
            metrics.WEIGHTS_LAG.labels(self.status.replica).set(newest.number - live.number)


def _attributes(version: VersionId) -> dict[str, int]:
    return {"etude.policy.epoch": version.epoch, "etude.policy.number": version.number}
