"""Publish pipeline: encode a version, upload it and publish its manifest, activate it on engines.

A version is encoded between two steps; the next step need not wait for it. Upload, manifest and
activation follow in a background task, one version after the other:

| task | calls | waits for |
|---|---|---|
| trainer | publish(), drain() | room in the queue; errors of a version are raised there |
| background | run() | an encoded version; after a setback, for the trainer's recovery |
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from opentelemetry import context, trace

from etude.common.blobs import Store
from etude.common.store_retry import StoreRetry
from etude.common.weights import (
    EpochRecord,
    VersionId,
    accepted_chain,
    claim_epoch,
    list_quarantined,
    quarantine,
    read_epoch,
)
from etude.common.weights.protocol.manifest import WeightManifest
from etude.trainer import metrics
from etude.trainer.controller.checkpoints.recovery import JournaledLedger
from etude.trainer.controller.progress import RunProgress
from etude.trainer.controller.publishing.compaction import CompactionMonitor
from etude.trainer.controller.publishing.engines import Engines, VersionRefusedError
from etude.trainer.controller.publishing.in_flight import InFlightQueue
from etude.trainer.controller.publishing.versions import BaseLostError, VersionChain
from etude.trainer.controller.reporting.commands import RunCommands
from etude.trainer.controller.reporting.reporter import RunReporter
from etude.trainer.controller.reporting.rows import (
    PublishedVersion,
    Row,
    RowPosition,
    version_row,
)
from etude.trainer.learner.protocol import Learners
from etude.v1 import journal_pb2

MAX_REFUSALS = 2
"""Refused versions in a row that are published again; then the version is not at fault."""

log = logging.getLogger(__name__)

_TRACER = trace.get_tracer("etude.trainer")


class EncodedVersion(NamedTuple):
    """An encoded version in the ranks' memory, to be uploaded and published."""

    manifest: WeightManifest
    started_s: float
    """Of time.monotonic()."""
    position: RowPosition
    """Position of the run at its weights."""
    sequence: int
    """Newest journal record that its weights depend on."""
    is_served: bool
    """True if it stays in flight until engines serve it."""
    trace: context.Context
    """Trace context of the step."""


@dataclass(slots=True, kw_only=True)
class PublishPipeline:
    """Publishes and activates policy versions of a run, in order."""

    progress: RunProgress
    reporter: RunReporter
    commands: RunCommands
    book: JournaledLedger
    learners: Learners
    engines: Engines
    chain: VersionChain
    compaction: CompactionMonitor
    next_version: int
    queue: InFlightQueue[EncodedVersion] = field(
        default_factory=lambda: InFlightQueue((VersionRefusedError, BaseLostError))
    )
    store_retry: StoreRetry = field(default_factory=StoreRetry)
    """Retries of calls that a step waits for."""
    upload_retry: StoreRetry = field(default_factory=StoreRetry)
    """Retries of uploads, which run during the steps."""
    batch_sequence: int = 0
    """Journal record of the newest batch in the weights."""
    served: VersionId | None = None
    """The newest version that engines serve."""
    publish_s: float = 0.0
    """Duration of the newest version's publishing, from encoding to manifest."""
    unserved: Row | None = None
    """Row of a published version that engines do not serve yet."""

    async def run(self) -> NoReturn:
        """Upload, publish and activate encoded versions until cancelled; raise their errors."""
        await self.queue.run(self._publish_encoded)

    async def run_compaction(self) -> None:
        """Run the compactor's rounds until cancelled."""
        await self.compaction.run(lambda: self.newest_number)

    @property
    def newest_number(self) -> int:
        policy = self.progress.cursor.policy
        if policy is not None and policy[0] == self.progress.epoch:
            return policy[1]
        return self.next_version - 1 - len(self.queue)

    async def publish(self, *, ahead: int = 0, is_served: bool = False) -> bool:
        """Make the current weights the newest version; False if they already are.

        No step may be under way.

        Args:
            ahead: limit of versions in flight on return.
            is_served: True if the version stays in flight until engines serve it.

        Raises:
            FencedError: a newer controller took over.
            NonFiniteWeightsError: the current weights are NaN or infinite.
            StoreError: the store stayed away.
            VersionRefusedError: the engines refuse version after version.
        """
        if self.compaction.chain_break():
            # The ranks hold versions in flight, which build on the chain as it is.
            await self.drain()
            self._restart_chain()
        is_new = not self._is_newest()
        if is_new:
            await self._encode(is_served=is_served)
        await self.drain(most=ahead)
        return is_new

    async def drain(self, *, most: int = 0) -> None:
        """Wait until at most this many versions are in flight, and recover from a setback.

        After a setback, the current weights are published as a complete version first.

        Raises:
            FencedError: a newer controller took over.
            StoreError: the store stayed away.
            VersionRefusedError: the engines refuse version after version.
        """
        try:
            await self.queue.wait_for_room(most)
        except VersionRefusedError as error:
            first, *_ = self.queue.withdraw()
            await self.abandon_version(first.manifest.version, why=str(error))
            await self.publish()
            await self.activate_newest(refusals=1)
        except BaseLostError as error:
            first, *_ = self.queue.withdraw()
            log.warning("published complete: %s", error)
            self.chain.base, self.next_version = None, first.manifest.number
            await self.publish(is_served=first.is_served)

    async def activate_newest(self, *, refusals: int = 0) -> None:
        """Activate the newest version on the engines; none may be in flight.

        A version whose content most of them refuse is list_quarantined, and published again.

        Raises:
            EnginesLateError: no engine did in time.
            VersionRefusedError: versions published again are refused, too.
            FencedError: a newer controller took over.
            StoreError: the store stayed away.
        """
        while self.progress.cursor.policy is not None:
            version = VersionId(*self.progress.cursor.policy)
            try:
                await self._activate(version)
            except VersionRefusedError as error:
                if refusals >= MAX_REFUSALS:
                    raise
                refusals += 1
                await self.abandon_version(version, why=str(error))
                await self.publish()
            else:
                return

    async def abandon_version(self, version: VersionId, *, why: str) -> None:
        """Quarantine a version, roll engines back, and continue in a new epoch.

        It can no longer be activated, and rollouts that it sampled are dropped. The next version
        is complete, so that it does not build on a faulty one.

        Raises:
            FencedError: another controller took over.
            StoreError: the store stayed away.
        """
        store, retry = self.chain.store, self.store_retry.retry
        await retry("quarantine", lambda: asyncio.to_thread(quarantine, store, version, reason=why))
        parent = await retry("versions", lambda: asyncio.to_thread(_newest_before, store, version))
        message = f"{version} is rolled back to {parent or 'none'}: {why}"
        self.reporter.record_event("VersionQuarantined", message, warning=True)
        epoch = await self.book.journal.open_epoch(
            lambda: retry("epoch", lambda: asyncio.to_thread(self._claim_epoch, parent))
        )
        record = await retry("epoch", lambda: asyncio.to_thread(read_epoch, store, epoch))
        self._begin_epoch(record)
        if parent is not None:
            await self.engines.roll_back(parent)

    def _claim_epoch(self, parent: VersionId | None) -> int:
        return claim_epoch(
            self.chain.store,
            holder=self.chain.holder,
            parent=parent,
            reason="rollback",
            after=self.progress.epoch,
        )

    def _begin_epoch(self, record: EpochRecord) -> None:
        """Continue in an epoch that this controller opened; the next version is complete."""
        self.progress.epoch, self.next_version = record.epoch, record.first_number
        parent = record.parent
        self.progress.cursor.policy = None if parent is None else (parent.epoch, parent.number)
        self.chain.base = None
        self.compaction.begin_epoch(record)

    def _restart_chain(self) -> None:
        """Make the next version complete if the chain is still broken."""
        problem = self.compaction.chain_break()
        if problem:
            message = f"the next version is complete: {problem}"
            self.reporter.record_event("ChainBroken", message, warning=True)
            self.chain.base = None
            self.compaction.note_complete_version(self.next_version)

    def _is_newest(self) -> bool:
        """True if the newest version, published or in flight, has the current weights."""
        cursor, newest = self.progress.cursor, self.queue.newest
        if newest is not None:
            return newest.manifest.step == cursor.global_step
        if cursor.policy is None or cursor.policy[0] != self.progress.epoch:
            return False
        return self.book.ledger.versions.get(VersionId(*cursor.policy)) == cursor.global_step

    async def _encode(self, *, is_served: bool) -> None:
        started_s = time.monotonic()
        version = VersionId(self.progress.epoch, self.next_version)
        step = self.progress.cursor.global_step
        with _TRACER.start_as_current_span("encode") as span:
            span.set_attributes({"etude.policy": str(version), "etude.step": step})
            manifest = await self.chain.encode(
                self.learners, version, step=step, store_retry=self.store_retry
            )
        self.next_version += 1
        self.queue.add(
            EncodedVersion(
                manifest=manifest,
                started_s=started_s,
                position=self.progress.position(),
                sequence=self.batch_sequence,
                is_served=is_served,
                trace=context.get_current(),
            )
        )

    async def _publish_encoded(self, encoded: EncodedVersion) -> None:
        """Upload an encoded version and publish its manifest; activate it if it is to be served.

        Raises:
            BaseLostError: its base is lost, so it can never be published.
            EnginesLateError: no engine served it in time.
            FencedError: a newer controller took over.
            StoreError: the store stayed away.
            VersionRefusedError: the engines found its content wrong.
        """
        manifest, version = encoded.manifest, encoded.manifest.version
        # A successor must be able to train its weights up to any visible version.
        await self.book.journal.wait_durable(encoded.sequence)
        with _TRACER.start_as_current_span("publish", context=encoded.trace) as span:
            span.set_attributes({"etude.policy": str(version), "etude.step": manifest.step})
            await self.chain.upload_and_publish(
                self.learners, manifest, store_retry=self.upload_retry
            )
        self.progress.cursor.policy = (version.epoch, version.number)
        self.publish_s = time.monotonic() - encoded.started_s
        body = journal_pb2.JournalPublished(
            epoch=version.epoch,
            number=version.number,
            step=manifest.step,
            manifest_sha256=manifest.sha256,
        )
        self.book.write(journal_pb2.JournalRecord(published=body))
        published = _count_published(manifest, self.publish_s)
        self.unserved = version_row(encoded.position, version, self.publish_s, published)
        self.engines.announce(version)
        self.progress.mark_progress()
        self.reporter.update_status()
        if encoded.is_served:
            await self._activate(version)

    async def _activate(self, version: VersionId) -> None:
        """Activate a version on the engines; a run that is told to stop does not wait for them."""
        # The number of engines changes between versions only: a new one must load this version.
        self.engines.limit = self.commands.engines or self.engines.limit
        await self.commands.run_unless_stopped(self.engines.activate(version))
        self.served = version
        self.progress.mark_progress()
        self.record_version(swap_ms=round(self.engines.last_pause_s * 1e3, 2))

    def record_version(self, **fields: float) -> None:
        """Record the newest published version, unless it is recorded."""
        if self.unserved is not None:
            self.reporter.recorder.add_row(self.unserved | fields)
            self.unserved = None


def _newest_before(store: Store, version: VersionId) -> VersionId | None:
    """The newest accepted version before this one that is not quarantined; None without one."""
    refused = list_quarantined(store)
    older = [
        each
        for each in accepted_chain(store)
        if each.number < version.number and each not in refused
    ]
    return older[-1] if older else None


def _count_published(manifest: WeightManifest, publish_s: float) -> PublishedVersion:
    """Size and statistics of a version, counted in the metrics."""
    published = PublishedVersion(
        manifest.sha256,
        manifest.num_bytes,
        manifest.stats,
        is_complete=manifest.is_complete,
    )
    metrics.PUBLISH.observe(publish_s)
    metrics.PUBLISHED_BYTES.inc(published.size_bytes)
    if not published.is_complete:
        metrics.CHANGED.set(published.density)
        metrics.BITS_PER_CHANGE.set(published.bits_per_change)
    return published
