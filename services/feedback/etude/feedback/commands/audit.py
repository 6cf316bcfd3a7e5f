"""`etude-feedback audit`: invariants of the ledger and of the windows, checked offline."""

import asyncio
import sys
from datetime import UTC, datetime

from etude.common import process
from etude.common.stores import open_run_store
from etude.feedback.ledger.audit import audit_ledger
from etude.feedback.ledger.user_keys import LedgerSecret
from etude.feedback.settings import Settings
from etude.feedback.windows.audit import audit_windows


async def audit(settings: Settings) -> None:
    """Print counts and broken invariants of ledger and windows; exit with 1 if there are any."""
    secret = LedgerSecret.read(settings.secret_file)
    store = open_run_store(settings.store, settings.access)
    ledger = await asyncio.to_thread(audit_ledger, store, uid=settings.ledger)
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(ledger.num_records.items()))
    sys.stdout.write(f"records: {counts or 'none'}\nhead: {ledger.head.hex()}\n")
    for finding in ledger.findings:
        sys.stdout.write(f"{finding.invariant}: {finding.what}\n")
    if ledger.findings:
        process.exit_with("etude-feedback", "the ledger is damaged", 1)
    found = await asyncio.to_thread(
        audit_windows, store, secret, settings.windows, uid=settings.ledger
    )
    reasons = "".join(f", {number} {reason}" for reason, number in sorted(found.masked.items()))
    sys.stdout.write(
        f"windows: {found.num_windows}\nserved rollouts: {found.num_served} ="
        f" {found.num_trained} trained + {found.num_waiting} waiting"
        f" + {found.masked.total()} masked{reasons}\n"
    )
    if found.removed_ms:
        before = datetime.fromtimestamp(found.removed_ms / 1_000, UTC).isoformat(timespec="seconds")
        sys.stdout.write(
            f"turns from before {before} are removed: {found.num_removed} rollouts of windows are"
            " not compared with theirs, and those that waited are not counted\n"
        )
    for each in found.findings:
        sys.stdout.write(f"{each.invariant}: {each.what}\n")
    if found.findings:
        process.exit_with("etude-feedback", "windows are damaged", 1)
