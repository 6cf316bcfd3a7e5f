"""`python -m etude.trainer.commands.audit STORE`: audit a run's journal and trajectories."""

import argparse
import json
import sys

from etude.common.api.storage import StoreAccess
from etude.common.blobs import Store
from etude.common.errors import EtudeError
from etude.common.stores import open_source
from etude.trainer.controller.journal.audit import (
    JOURNAL,
    JournalAudit,
    JournalFinding,
    audit_journal,
)
from etude.trainer.controller.journal.trajectory_audit import (
    TRAJECTORIES,
    audit_trajectories,
    journaled_rollouts,
)


def audit_store(store: Store) -> JournalAudit:
    """Audit the run whose prefix the store is opened at."""
    journal = {info.key: store.get(info.key) for info in store.list(JOURNAL)}
    account = audit_journal(journal)
    if not account.findings:
        logs = {info.key: store.get(info.key) for info in store.list(TRAJECTORIES)}
        lost: list[JournalFinding] = []
        rollouts = journaled_rollouts(journal, store.get, lost)
        account.findings += audit_trajectories(logs, rollouts) + lost
    return account


def summary(account: JournalAudit) -> dict[str, object]:
    """Summarise the audit as JSON: accepted = trained + dropped + queued, or there are findings."""
    return {
        "accepted": account.accepted,
        "trained": account.trained,
        "dropped": dict(account.dropped),
        "queued": account.queued,
        "lost": account.accepted - account.trained - account.dropped.total() - account.queued,
        "findings": [f"{found.invariant}: {found.what}" for found in account.findings],
    }


def main() -> None:
    """Print the account.

    Raises:
        SystemExit: with 1 when an invariant is broken.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", help="the run's prefix: file:///folder or s3://bucket/prefix")
    parser.add_argument("--endpoint", help="S3 endpoint, for stores other than AWS")
    chosen = parser.parse_args()
    try:
        account = audit_store(open_source(chosen.store, StoreAccess(endpoint=chosen.endpoint)))
    except (EtudeError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from error
    sys.stdout.write(json.dumps(summary(account)) + "\n")
    raise SystemExit(1 if account.findings else 0)


if __name__ == "__main__":
    main()
