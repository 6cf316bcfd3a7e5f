"""Records of snapshots on disk, from which a host's next process adopts them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from blake3 import blake3

from etude.common.errors import CorruptError
from etude.envserver.drivers.base import SavedSandbox
from etude.envserver.host.leases import records
from etude.envserver.host.leases.records import CALLS, STATE

SAVED = "saved"
_MAX_TTL_S = 1e9
"""JSON has no infinity."""


class SnapshotOrigin(NamedTuple):
    """Lease, run and first files of a snapshot."""

    run_id: str
    lease_id: str
    template: str
    uri: str
    source_key: str
    """Identity of the first files, the base of the environment's diff."""


class SnapshotTerms(NamedTuple):
    """Life of a snapshot, who may drop it, and whether hidden tests may run on it."""

    ttl_s: float = math.inf
    """Longest life, within the quota's."""
    control_digest: str = ""
    """Digest of its lease's control token, which drops it also after the lease has ended."""
    is_prepared: bool = False
    """True if a task was set up in it, and no agent's call has run."""
    setup_files: Mapping[str, str] = MappingProxyType({})
    """Of its lease's record."""


NO_TERMS = SnapshotTerms()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSnapshot:
    """The saved state of one environment."""

    snapshot_id: str
    origin: SnapshotOrigin
    saved: SavedSandbox
    has_memory: bool
    created_unix_ms: int
    folder: Path
    terms: SnapshotTerms

    @property
    def key(self) -> tuple[str, str]:
        """Run and id, the key on this host."""
        return self.origin.run_id, self.snapshot_id


def token_digest(token: str) -> str:
    """Digest of a lease's token."""
    return blake3(token.encode()).hexdigest()


def write_record(made: LocalSnapshot) -> None:
    """Make a snapshot durable; its files must be there."""
    said = {
        "snapshot_id": made.snapshot_id,
        "origin": made.origin._asdict(),
        "saved": asdict(made.saved),
        "has_memory": made.has_memory,
        "created_unix_ms": made.created_unix_ms,
        "terms": made.terms._asdict()
        | {
            "ttl_s": min(made.terms.ttl_s, _MAX_TTL_S),
            "setup_files": dict(made.terms.setup_files),
        },
    }
    records.write_json(made.folder / STATE, said)


def load_record(folder: Path) -> LocalSnapshot:
    """Read the snapshot of a folder.

    Raises:
        CorruptError: there is none, or it cannot be read.
    """
    said = records.read_json(folder / STATE)
    if said is None or not (folder / CALLS).exists():
        raise CorruptError(f"{folder}: was never finished")
    try:
        return LocalSnapshot(
            snapshot_id=said["snapshot_id"],
            origin=SnapshotOrigin(**said["origin"]),
            saved=SavedSandbox(**said["saved"]),
            has_memory=said["has_memory"],
            created_unix_ms=said["created_unix_ms"],
            folder=folder,
            terms=SnapshotTerms(**said.get("terms", {})),  # earlier releases wrote none
        )
    except (KeyError, TypeError) as cause:
        raise CorruptError(f"{folder / STATE}: {cause}") from cause
