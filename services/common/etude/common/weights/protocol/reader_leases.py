"""Reader leases: versions that a replica still needs, which the garbage collector keeps."""

import re
import secrets
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from blake3 import blake3
from pydantic import BaseModel, StringConstraints

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, StoreError
from etude.common.weights.protocol import records
from etude.common.weights.protocol.chain_view import take_lineage_view
from etude.common.weights.protocol.manifest import Count, VersionRef
from etude.common.weights.protocol.plan import Edge, oldest_needed, plan_path
from etude.common.weights.protocol.tombstones import read_trash
from etude.common.weights.protocol.versions import LEASES, VersionId

_MAX_ATTEMPTS = 8
"""Each lost attempt means that a collector ran meanwhile; more of them are no accident."""

_KEY = re.compile(re.escape(LEASES) + r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.json")


class Lease(BaseModel):
    """Renewed by its one owner; a lease without renewal is ignored after some rounds."""

    model_config = records.STRICT

    format: Literal[1] = 1
    replica: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    live: VersionRef | None
    """What it serves."""
    needs: VersionRef | None
    """The oldest version that it reads or builds on: all since then stays."""
    serial: Count
    """Rises with each writing."""

    @property
    def key(self) -> str:
        return f"{LEASES}{self.replica}.json"


class ObservedLease(NamedTuple):
    """A lease as the collector finds it."""

    replica: str
    needs: VersionId | None
    token: str
    """Changes with each renewal of the lease."""
    is_readable: bool
    """A damaged lease needs everything, until it is ignored."""


@dataclass(slots=True)
class ReaderLease:
    """The lease of one replica, which it alone writes.

    A collector ignores a lease that was not written for many of its rounds: renew() it while
    nothing else does.
    """

    store: Store
    replica: str
    live: VersionRef | None = None
    """What the replica serves."""
    _needs: VersionRef | None = None
    _serial: int = field(default_factory=lambda: secrets.randbits(40))
    """Starts at random, so that a replica that restarts does not look abandoned."""
    _is_written: bool = False
    """True if the store is known to have it: a put that failed may have taken effect."""

    def plan_path(
        self,
        target: VersionId,
        *,
        avoid: frozenset[str] = frozenset(),
        may_be_abandoned: bool = False,
    ) -> list[Edge]:
        """Plan a path from the live version; no collector deletes its objects under the lease.

        Keys to avoid, because they turned out to be damaged, come on top of those that are being
        deleted.

        Writes the lease, then reads the trash, then looks at what is there: a collector that
        missed the lease has left its tombstone to be seen, or is done and has left nothing that
        could be planned with.

        Args:
            target: where to.
            avoid: keys of damaged objects.
            may_be_abandoned: true for a target that is wanted though the run went on without it.

        Raises:
            StoreError: the store failed, or collectors took every plan apart.
            EtudeError: as plan_path().
        """
        for _ in range(_MAX_ATTEMPTS):
            doomed = read_trash(self.store).keys
            view = take_lineage_view(self.store, target) if may_be_abandoned else None
            edges = plan_path(self.store, self.live, target, avoid=avoid | doomed, view=view)
            first = oldest_needed(edges)
            if first is None or (self._is_written and first == self._needs):
                return edges
            self._write(first)
        raise StoreError(f"{self.store.url}: what leads to version {target} is being deleted")

    def record_live(self, live: VersionRef) -> None:
        """Record the live version; the collector keeps all versions since then.

        Raises:
            StoreError: the store failed; the live version is remembered nevertheless.
        """
        self.live = live
        self._write(live)

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            StoreError: the store failed.
        """
        self._write(self._needs)

    def release(self) -> None:
        """Release the lease.

        Raises:
            StoreError: the store failed.
        """
        self._is_written = False
        self.store.delete([f"{LEASES}{self.replica}.json"])

    def _write(self, wanted: VersionRef | None) -> None:
        self._is_written = False
        self._needs = wanted
        self._serial += 1
        lease = Lease(replica=self.replica, live=self.live, needs=wanted, serial=self._serial)
        self.store.put(lease.key, records.to_bytes(lease))
        self._is_written = True


def observe_leases(store: Store) -> list[ObservedLease]:
    """Every lease, by replica."""
    found: list[ObservedLease] = []
    for info in store.list(LEASES):
        named = _KEY.fullmatch(info.key)
        if named is not None:
            seen = _observe_lease(store, info.key, named[1])
            found += [] if seen is None else [seen]
    return found


def _observe_lease(store: Store, key: str, replica: str) -> ObservedLease | None:
    try:
        data = records.fetch(store, key)
    except MissingError:  # given up meanwhile
        return None
    except CorruptError:  # larger than any record
        return ObservedLease(replica, None, key, is_readable=False)
    token = blake3(data).hexdigest()
    try:
        lease = records.parse(Lease, data, where=f"{store.url}/{key}")
    except CorruptError:
        return ObservedLease(replica, None, token, is_readable=False)
    wanted = None if lease.needs is None else lease.needs.version
    return ObservedLease(replica, wanted, token, lease.replica == replica)
