"""Publish pipeline: encode a version, upload it and publish its manifest, activate it on engines.

A version is encoded between two steps; the next step need not wait for it. Upload, manifest and
activation follow in the background (publish_encoded), one version after the other.
"""

import logging
import time

from opentelemetry import context, trace

from etude.common.weights import VersionId
from etude.trainer import metrics
from etude.trainer.controller.publishing.engines import VersionRefusedError
from etude.trainer.controller.publishing.rollback import abandon_version
from etude.trainer.controller.publishing.versions import BaseLostError, EncodedVersion
from etude.trainer.controller.reporting.rows import PublishedVersion, version_row
from etude.trainer.controller.run import Run
from etude.v1 import journal_pb2

MAX_REFUSALS = 2
"""Refused versions in a row that are published again; then the version is not at fault."""

log = logging.getLogger(__name__)

_TRACER = trace.get_tracer("etude.trainer")


async def publish(run: Run, *, ahead: int = 0, is_served: bool = False) -> bool:
    """Make the current weights the newest version; False if they already are.

    Args:
        run: the run; no step may be under way.
        ahead: limit of versions in flight on return.
        is_served: True if the version stays in flight until engines serve it.

    Raises:
        FencedError: a newer controller took over.
        NonFiniteWeightsError: the current weights are NaN or infinite.
        StoreError: the store stayed away.
        VersionRefusedError: the engines refuse version after version.
    """
    if run.compaction.chain_break():
        await drain(run)  # the ranks hold what is in flight, which builds on the chain as it is
        _restart_chain(run)
    is_new = not _is_newest(run)
    if is_new:
        await _encode(run, is_served=is_served)
    await drain(run, most=ahead)
    return is_new


async def drain(run: Run, *, most: int = 0) -> None:
    """Drain the pipeline to at most this many versions in flight, and recover from a setback.

    After a setback, the current weights are published as a complete version first.

    Raises:
        FencedError: a newer controller took over.
        StoreError: the store stayed away.
        VersionRefusedError: the engines refuse version after version.
    """
    try:
        await run.in_flight.wait_for_room(most)
    except VersionRefusedError as error:
        first, *_ = run.in_flight.withdraw()
        await abandon_version(run, first.manifest.version, why=str(error))
        await publish(run)
        await activate_newest(run, refusals=1)
    except BaseLostError as error:
        first, *_ = run.in_flight.withdraw()
        log.warning("published complete: %s", error)
        run.versions.base, run.next_version = None, first.manifest.number
        await publish(run, is_served=first.is_served)


async def activate_newest(run: Run, *, refusals: int = 0) -> None:
    """Activate the newest version on the engines; none may be in flight.

    A version whose content most of them refuse is quarantined, and the weights are published again.

    Raises:
        EnginesLateError: no engine did in time.
        VersionRefusedError: versions published again are refused, too.
        FencedError: a newer controller took over.
        StoreError: the store stayed away.
    """
    while run.cursor.policy is not None:
        version = VersionId(*run.cursor.policy)
        try:
            await _activate(run, version)
        except VersionRefusedError as error:
            if refusals >= MAX_REFUSALS:
                raise
            refusals += 1
            await abandon_version(run, version, why=str(error))
            await publish(run)
        else:
            return


async def publish_encoded(run: Run, encoded: EncodedVersion) -> None:
    """Upload an encoded version and publish its manifest; activate it if it is marked for that.

    Raises:
        BaseLostError: its base is lost, so it can never be published.
        EnginesLateError: no engine served it in time.
        FencedError: a newer controller took over.
        StoreError: the store stayed away.
        VersionRefusedError: the engines found its content wrong.
    """
    manifest, version = encoded.manifest, encoded.manifest.version
    # A successor must be able to train its weights up to any visible version.
    await run.book.journal.wait_durable(encoded.sequence)
    with _TRACER.start_as_current_span("publish", context=encoded.trace) as span:
        span.set_attributes({"etude.policy": str(version), "etude.step": manifest.step})
        await run.versions.upload_and_publish(run.learners, manifest, patience=run.upload_retry)
    run.cursor.policy = (version.epoch, version.number)
    run.publish_s = time.monotonic() - encoded.started_s
    body = journal_pb2.JournalPublished(
        epoch=version.epoch,
        number=version.number,
        step=manifest.step,
        manifest_sha256=manifest.sha256,
    )
    run.book.write(journal_pb2.JournalRecord(published=body))
    run.unserved = version_row(
        encoded.place, version, run.publish_s, _count_published(run, encoded)
    )
    run.engines.announce(version)
    run.mark_progress()
    run.update_status()
    if encoded.is_served:
        await _activate(run, version)


def _restart_chain(run: Run) -> None:
    """Make the next version complete if the chain is broken."""
    problem = run.compaction.chain_break()
    if problem:
        run.record_event("ChainBroken", f"the next version is complete: {problem}", warning=True)
        run.versions.base = None
        run.compaction.note_complete_version(run.next_version)


async def _encode(run: Run, *, is_served: bool) -> None:
    started_s = time.monotonic()
    version = VersionId(run.epoch, run.next_version)
    step = run.cursor.global_step
    with _TRACER.start_as_current_span("encode") as span:
        span.set_attributes({"etude.policy": str(version), "etude.step": step})
        manifest = await run.versions.encode(
            run.learners, version, step=step, patience=run.store_retry
        )
    run.next_version += 1
    run.in_flight.add(
        EncodedVersion(
            manifest=manifest,
            started_s=started_s,
            place=run.place(),
            sequence=run.batch_sequence,
            is_served=is_served,
            trace=context.get_current(),
        )
    )


async def _activate(run: Run, version: VersionId) -> None:
    """Activate a version on the engines; a run that is told to stop does not wait for them."""
    # The number of engines changes between versions only: a new engine must load this one first.
    run.engines.limit = run.commands.engines or run.engines.limit
    await run.run_unless_stopped(run.engines.activate(version))
    run.served = version
    run.mark_progress()
    if run.unserved is not None:
        swap_ms = run.engines.last_pause_s * 1e3
        run.recorder.add_row(run.unserved | {"swap_ms": round(swap_ms, 2)})
        run.unserved = None


def _count_published(run: Run, encoded: EncodedVersion) -> PublishedVersion:
    """Size and statistics of a version, counted in the metrics."""
    manifest = encoded.manifest
    published = PublishedVersion(
        manifest.sha256,
        manifest.num_bytes,
        manifest.stats,
        is_complete=manifest.is_complete,
    )
    metrics.PUBLISH.observe(run.publish_s)
    metrics.PUBLISHED_BYTES.inc(published.size_bytes)
    if not published.is_complete:
        metrics.CHANGED.set(published.density)
        metrics.BITS_PER_CHANGE.set(published.bits_per_change)
    return published


def _is_newest(run: Run) -> bool:
    """True if the newest version, published or in flight, has the current weights."""
    newest = run.in_flight.newest
    if newest is not None:
        return newest.manifest.step == run.cursor.global_step
    if run.cursor.policy is None or run.cursor.policy[0] != run.epoch:
        return False
    step = run.book.ledger.versions.get(VersionId(*run.cursor.policy))
    return step == run.cursor.global_step
