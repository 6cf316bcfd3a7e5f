"""Updater: moves one engine to a version on the cheapest update path without damage."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from opentelemetry import trace

from etude.common import weights
from etude.common.blobs import MissingError
from etude.common.errors import CorruptError, FencedError, StoreError
from etude.common.weights import Edge, ReaderLease, VersionId, VersionRef
from etude.common.weights.replicas.block_selection import select_regions
from etude.common.weights.replicas.delta_folding import UnfoldableError
from etude.common.weights.replicas.mirror import DamagedEdgeError
from etude.common.weights.tensors.schema import Schema
from etude.inference import metrics
from etude.inference.engine.interface import PolicyEngine
from etude.inference.swap.ranks import RankError
from etude.inference.updates.audit import Auditor
from etude.inference.updates.staging import Prefetcher, Stager
from etude.inference.updates.update_steps import UpdateStep, merge_path, split_path

MAX_PREPARES = 3
"""A rank that lacks memory often has it a little later."""

MAX_ACTIVATIONS = 2
"""Requests are frozen during each: one retry."""


class UpdateRemedy(Enum):
    """The next attempt."""

    RETRY = "the same way again"
    RESEED = "a complete version, in place of what changed"
    GIVE_UP = "a complete version again, and not ready until one is live"


@dataclass(frozen=True, slots=True)
class UpdateFailures:
    """Failures of ranks since the last version that went live without one."""

    prepares: int = 0
    activations: int = 0
    reseeds: int = 0
    """Complete versions that could not be loaded either."""

    @property
    def remedy(self) -> UpdateRemedy:
        """The remedy for these failures."""
        if self.prepares < MAX_PREPARES and self.activations < MAX_ACTIVATIONS:
            return UpdateRemedy.RETRY
        return UpdateRemedy.GIVE_UP if self.reseeds else UpdateRemedy.RESEED

    @property
    def reason(self) -> str:
        """Label of the failure that led to a complete version."""
        return "prepare_failed" if self.prepares >= MAX_PREPARES else "commit_failed"

    def add_prepare(self) -> "UpdateFailures":
        """These and one failed prepare."""
        return self._add(prepares=1)

    def add_activation(self) -> "UpdateFailures":
        """These and one failed activation."""
        return self._add(commits=1)

    def add_path(self) -> "UpdateFailures":
        """These and one damaged or missing object on the update path: no rank's fault."""
        return self._add()

    def _add(self, *, prepares: int = 0, commits: int = 0) -> "UpdateFailures":
        if self.remedy is not UpdateRemedy.RETRY:
            return replace(self, reseeds=self.reseeds + 1)
        return replace(
            self, prepares=self.prepares + prepares, activations=self.activations + commits
        )


UNDO_LIMIT_BYTES = 256 << 20
"""A complete version up to this size can be undone in memory; above it by reading the store."""

LEASE_RENEWAL_S = 30.0
"""Interval of lease renewals while no version is published."""

_tracer = trace.get_tracer("etude.inference")


class ActivatedVersion(NamedTuple):
    """One activation."""

    live: VersionId
    manifest_sha256: bytes
    pause_s: float
    took_s: float
    """Fetch, verify and activate."""


class _PreparedStep(NamedTuple):
    """An update step that is prepared on all ranks, but not live."""

    edge: Edge
    began: float


class _RefusedEdge(NamedTuple):
    """An update step that cannot be used."""

    edge: Edge
    error: CorruptError


@dataclass(slots=True, kw_only=True)
class Updater:
    """Updates one engine along the chain; calls come one at a time."""

    engine: PolicyEngine
    stager: Stager
    lease: ReaderLease
    auditor: Auditor
    on_live: Callable[[ActivatedVersion], None]
    """Called for each version that went live."""
    is_exact: bool = False
    """True if no version on the way may go live, and the target may be abandoned by its run."""
    _failures: UpdateFailures = field(default_factory=UpdateFailures)
    _prepared: _PreparedStep | None = None
    _renew_at: float = 0.0
    _schema: Schema | None = None
    _folds: bool = True
    """False once deltas turned out to need the words before each."""
    _prefetcher: Prefetcher = field(default_factory=Prefetcher)

    async def activate(self, version: VersionId) -> None:
        """Activate a version, or leave the old one serving.

        Raises:
            MissingError: it is not published, or was deleted.
            FencedError: it is not on the accepted chain.
            CorruptError: every path to it is damaged, or it does not fit the model.
            RankError: a rank failed; after enough failures a complete version is loaded.
            UnavailableError: the engine, or the scratch folder, failed.
            StoreError: the store failed.
        """
        if self._prepared is not None and self._prepared.edge.target.version == version:
            prepared, self._prepared = self._prepared, None
            await self._check_accepted(version)
            await self._activate_prepared(prepared)
        else:
            await self._update_to(version)
        self._failures = UpdateFailures()

    async def stage(self, version: VersionId) -> None:
        """Stage and prepare a version; the steps before it go live.

        A version that needs no download is not prepared: one that is live, or whose words are
        live or can be restored.

        Raises:
            EtudeError: as activate().
        """
        if version in {self.staged, self.engine.live}:
            return
        target = (await asyncio.to_thread(self.stager.read_manifest, version)).ref
        swap = self.engine.swap
        is_near = swap.live is not None and swap.live.state == target.state
        if not is_near and not swap.undo_stack.can_restore(target.state):
            await self._follow_path(version, holds=True)

    @property
    def staged(self) -> VersionId | None:
        """Version that is prepared on all ranks, but not live."""
        return None if self._prepared is None else self._prepared.edge.target.version

    @property
    def is_stuck(self) -> bool:
        """True if ranks keep failing even at complete versions."""
        return self._failures.remedy is UpdateRemedy.GIVE_UP

    @property
    def _reseeds(self) -> bool:
        return self._failures.remedy is not UpdateRemedy.RETRY

    def renew_lease(self) -> None:
        """Renew the reader lease if it is due.

        Raises:
            StoreError: the store failed.
        """
        is_held = self.engine.swap.live is not None and not self.is_exact
        if is_held and time.monotonic() >= self._renew_at:
            self.lease.renew()
            self._renew_at = time.monotonic() + LEASE_RENEWAL_S

    async def _update_to(self, version: VersionId) -> None:
        began = time.perf_counter()
        swap = self.engine.swap
        target = (await asyncio.to_thread(self.stager.read_manifest, version)).ref
        if swap.live is not None and swap.live.state == target.state:
            await self._check_accepted(version)
            await self._record_live(target, await swap.relabel(target), began)
        elif swap.undo_stack.can_restore(target.state):
            await self._check_accepted(version)
            await self._record_live(target, await swap.restore(target), began)
        else:
            await self._follow_path(version)

    async def _follow_path(self, version: VersionId, *, holds: bool = False) -> None:
        """Take the cheapest path; plan around objects that turn out to be damaged.

        Raises:
            CorruptError: every path is damaged; the first damage.
            MissingError: there is no path.
        """
        avoid: frozenset[str] = frozenset()
        problem: CorruptError | None = None
        while True:
            try:
                edges = await asyncio.to_thread(self._plan, version, avoid)
            except (MissingError, CorruptError):
                self._failures = self._failures.add_path()
                if problem is None:
                    raise
                raise problem from None
            try:
                refused = await self._run_steps(edges, is_detour=bool(avoid), holds=holds)
            except UnfoldableError:
                self._folds = False
                continue
            if refused is None:
                return
            problem = problem or refused.error
            damaged = {item.key for item in refused.edge.objects}
            if damaged <= avoid:
                self._failures = self._failures.add_path()
                raise problem
            avoid |= damaged

    def _plan(self, version: VersionId, avoid: frozenset[str]) -> list[Edge]:
        # To reseed is to plan as if nothing were live.
        self.lease.live = None if self._reseeds else self.engine.swap.live
        edges = self.lease.plan_path(version, avoid=avoid, may_be_abandoned=self.is_exact)
        if not self._folds and len(edges) > 1 and edges[0].base is not None:
            # Each of the deltas needs the words of a version that must not be served.
            self.lease.live = None
            edges = self.lease.plan_path(version, avoid=avoid, may_be_abandoned=True)
        return edges

    async def _run_steps(
        self, edges: list[Edge], *, is_detour: bool, holds: bool
    ) -> _RefusedEdge | None:
        steps = merge_path(edges) if self.is_exact else split_path(edges, self.engine.swap.live)
        with self._prefetcher.prefetching(steps):
            for number, (edge, _) in enumerate(steps):
                if edge.base is None and self.engine.swap.live is not None:
                    detour = "corrupt" if is_detour else "behind"
                    reason = self._failures.reason if self._reseeds else detour
                    metrics.WEIGHTS_RESEED.labels(reason).inc()
                try:
                    prepared = await self._prepare(number, edge)
                    await self._check_accepted(edge.target.version)
                    if holds and number == len(steps) - 1:
                        self._prepared = prepared
                    else:
                        await self._activate_prepared(prepared)
                except CorruptError as error:
                    metrics.WEIGHTS_CORRUPT.inc()
                    if self.engine.swap.live is not None:
                        # Damaged memory also makes a sound version lead to another state.
                        await self.auditor.audit()
                    damaged = error.edge if isinstance(error, DamagedEdgeError) else edge
                    return _RefusedEdge(damaged, error)
        return None

    async def _prepare(self, number: int, edge: Edge) -> _PreparedStep:
        self._prepared = None
        began = time.perf_counter()
        version, swap = edge.target.version, self.engine.swap
        is_first = swap.live is None
        with _tracer.start_as_current_span("stage", attributes=_attributes(version)):
            if swap.schema_sha256 != edge.schema_sha256:
                await swap.build_map(await asyncio.to_thread(self._schema_of, edge))
            staged = await self._prefetcher.wait_staged(number, self._stage)
            keep_old = edge.base is not None or edge.num_bytes <= UNDO_LIMIT_BYTES
            try:
                await swap.prepare(
                    staged, edge.target, base=edge.base, keep_old=keep_old and not is_first
                )
            except RankError:
                self._failures = self._failures.add_prepare()
                raise
        metrics.WEIGHTS_STAGE_SECONDS.observe(time.perf_counter() - began)
        return _PreparedStep(edge, began)

    async def _activate_prepared(self, held: _PreparedStep) -> None:
        edge, began = held
        version, swap = edge.target.version, self.engine.swap
        is_first = swap.live is None
        committing, undone = time.perf_counter(), swap.num_undone
        try:
            with _tracer.start_as_current_span("commit", attributes=_attributes(version)):
                pause_s = await swap.activate()
        except RankError:
            self._failures = self._failures.add_activation()
            raise
        finally:
            metrics.WEIGHTS_UNDO.inc(swap.num_undone - undone)
        metrics.WEIGHTS_COMMIT_SECONDS.observe(time.perf_counter() - committing)
        await self.auditor.count_activation(is_first=is_first)
        await self._record_live(edge.target, pause_s, began)

    def _stage(self, step: UpdateStep) -> Path:
        """Fetch the blocks of a step's target that the ranks hold, by their weight map."""
        regions = self.engine.swap.regions
        if len(step.parts) > 1 and step.edge.base is None:
            return self.stager.stage_merged(step, regions.keys())
        schema = self._schema_of(step.edge)
        wanted = select_regions(schema, regions)
        if len(step.parts) > 1:
            return self.stager.stage_folded(step, schema, wanted)
        return self.stager.stage_blocks(step.edge, schema, wanted)

    def _schema_of(self, edge: Edge) -> Schema:
        if self._schema is None or self._schema.sha256 != edge.schema_sha256:
            self._schema = self.stager.read_schema(edge.schema_sha256)
        return self._schema

    async def _record_live(self, target: VersionRef, pause_s: float, began: float) -> None:
        if not self._reseeds:
            self._failures = UpdateFailures()
        self._report_live(target.version, bytes.fromhex(target.manifest_sha256), pause_s, began)
        await asyncio.to_thread(self._finish_update, target)

    def _finish_update(self, live: VersionRef) -> None:
        self.stager.keep_only(*self._prefetcher.pending_versions())
        metrics.WEIGHTS_UNDO_BYTES.set(self.engine.swap.undo_stack.num_bytes)
        if self.is_exact:
            # The next version may be any one: its path is planned, and held, when it is known.
            with contextlib.suppress(StoreError):  # a lease that nobody renews is ignored later
                self.lease.release()
        else:
            self.lease.record_live(live)
        self._renew_at = time.monotonic() + LEASE_RENEWAL_S

    def _report_live(self, live: VersionId, sha256: bytes, pause_s: float, began: float) -> None:
        metrics.WEIGHTS_PAUSE_SECONDS.observe(pause_s)
        self.on_live(ActivatedVersion(live, sha256, pause_s, time.perf_counter() - began))

    async def _check_accepted(self, version: VersionId) -> None:
        """Check that a version is on the accepted chain; its manifest must have been read before.

        Raises:
            FencedError: a newer epoch does not descend from the version.
        """
        if not self.is_exact and not await asyncio.to_thread(
            weights.is_accepted, self.stager.store, version
        ):
            raise FencedError(f"version {version} is not on the accepted chain")


def _attributes(version: VersionId) -> dict[str, int]:
    return {"etude.policy.epoch": version.epoch, "etude.policy.number": version.number}
