"""New weights on their way to the engines: published, then served."""

import time

from opentelemetry import trace

from etude.common.weights import VersionId
from etude.trainer import metrics
from etude.trainer.controller.engines import VersionRefusedError
from etude.trainer.controller.records import version_row
from etude.trainer.controller.rolling_back import abandon
from etude.trainer.controller.run import Run
from etude.trainer.work import Published
from etude.v1 import journal_pb2

MAX_REFUSALS = 2
"""Times in a row that a version is published anew: what is wrong then is not the version."""

_TRACER = trace.get_tracer("etude.trainer")


async def publish(run: Run) -> float:
    """Make the present weights the newest version, unless they are; returns the seconds taken.

    Raises:
        FencedError: a newer controller took over.
        StoreError: the store stayed away.
    """
    if _is_published(run):
        return 0.0
    started = time.monotonic()
    version = VersionId(run.epoch, run.next_version)
    step = run.cursor.global_step
    with _TRACER.start_as_current_span("publish") as span:
        span.set_attributes({"etude.policy": str(version), "etude.step": step})
        published = await _published(run, version, step)
    run.next_version += 1
    run.cursor.policy = (version.epoch, version.number)
    seconds = time.monotonic() - started
    body = journal_pb2.JournalPublished(
        epoch=version.epoch,
        number=version.number,
        step=step,
        manifest_sha256=published.manifest_sha256,
    )
    run.book.write(journal_pb2.JournalRecord(published=body))
    metrics.PUBLISH.observe(seconds)
    run.unserved = version_row(run.place(), version, seconds, published)
    run.engines.announce(version)
    run.moved()
    run.report()
    return seconds


async def serve(run: Run) -> float:
    """Have the engines serve the newest version; returns their pause in milliseconds.

    A run that is told to stop does not wait for engines.

    A version whose content most of them refuse is left for good, and published anew.

    Raises:
        EnginesLateError: none did in time.
        VersionRefusedError: what was published anew is refused, too.
        FencedError: a newer controller took over.
        StoreError: the store stayed away.
    """
    for refusals in range(MAX_REFUSALS + 1):
        if run.cursor.policy is None:
            break
        version = VersionId(*run.cursor.policy)
        try:
            await run.unless_halted(run.engines.commit(version))
            break
        except VersionRefusedError as error:
            if refusals == MAX_REFUSALS:
                raise
            await abandon(run, version, why=str(error))
            await publish(run)
    run.moved()
    swap_ms = run.engines.last_pause_s * 1e3
    if run.unserved is not None:
        run.recording.note(run.unserved | {"swap_ms": round(swap_ms, 2)})
        run.unserved = None
    return swap_ms


async def _published(run: Run, version: VersionId, step: int) -> Published:
    manifest = await run.versions.publish(run.learners, version, step=step, patience=run.patience)
    published = Published(
        manifest.sha256,
        manifest.num_bytes,
        manifest.stats,
        is_complete=manifest.is_complete,
    )
    metrics.PUBLISHED_BYTES.inc(published.size_bytes)
    if not published.is_complete:
        metrics.CHANGED.set(published.density)
        metrics.BITS_PER_CHANGE.set(published.bits_per_change)
    return published


def _is_published(run: Run) -> bool:
    if run.cursor.policy is None or run.cursor.policy[0] != run.epoch:
        return False
    step = run.book.ledger.versions.get(VersionId(*run.cursor.policy))
    return step == run.cursor.global_step
