"""Rollback from a version that engines refused: quarantine it, and continue in a new epoch."""

import asyncio
import logging

from etude.common.weights import (
    VersionId,
    accepted_chain,
    claim_epoch,
    list_quarantined,
    quarantine,
    read_epoch,
)
from etude.trainer.controller.run import Run

log = logging.getLogger(__name__)


async def abandon_version(run: Run, version: VersionId, *, why: str) -> None:
    """Quarantine a version, and continue from the one before it in a new epoch.

    It can no longer be activated, and rollouts that it sampled are dropped. The next version is
    complete, so that it does not build on a faulty one.

    Raises:
        FencedError: another controller took over.
        StoreError: the store stayed away.
    """
    store, patience = run.store, run.store_retry
    await patience.retry(
        "quarantine", lambda: asyncio.to_thread(quarantine, store, version, reason=why)
    )
    parent = await patience.retry(
        "versions", lambda: asyncio.to_thread(_newest_before, run, version)
    )
    message = f"{version} is rolled back to {parent or 'none'}: {why}"
    run.record_event("VersionQuarantined", message, warning=True)

    async def claim() -> int:
        return await patience.retry("epoch", lambda: asyncio.to_thread(_claim_epoch, run, parent))

    epoch = await run.book.journal.open_epoch(claim)
    record = await patience.retry("epoch", lambda: asyncio.to_thread(read_epoch, store, epoch))
    run.begin_epoch(record)
    if parent is not None:
        await run.engines.roll_back(parent)


def _newest_before(run: Run, version: VersionId) -> VersionId | None:
    """The newest accepted version before this one that is not quarantined; None without one."""
    refused = list_quarantined(run.store)
    older = [
        each
        for each in accepted_chain(run.store)
        if each.number < version.number and each not in refused
    ]
    return older[-1] if older else None


def _claim_epoch(run: Run, parent: VersionId | None) -> int:
    return claim_epoch(
        run.store, holder=run.versions.holder, parent=parent, reason="rollback", after=run.epoch
    )
