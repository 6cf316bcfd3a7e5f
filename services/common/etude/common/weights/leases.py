"""Reader leases: what a replica is about to read, so that the collector leaves it alone."""

import re
from typing import Annotated, Literal, NamedTuple

from blake3 import blake3
from pydantic import BaseModel, StringConstraints

from etude.common.blobs import MissingError, Store
from etude.common.errors import CorruptError, StoreError
from etude.common.weights import records
from etude.common.weights.manifest import Count, VersionRef
from etude.common.weights.plan import Edge, needs, plan
from etude.common.weights.trash import read_trash
from etude.common.weights.versions import LEASES, VersionId

_MAX_ATTEMPTS = 8
"""Each lost attempt means that a collector ran meanwhile; so many at once is no accident."""

_KEY = re.compile(re.escape(LEASES) + r"([A-Za-z0-9][A-Za-z0-9._-]{0,127})\.json")


class Lease(BaseModel):
    """Written by its one owner, again and again: one that rests is ignored after a while."""

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
        """Where the lease is."""
        return f"{LEASES}{self.replica}.json"

    def serving(self, live: VersionRef) -> "Lease":
        """The next lease of a replica that serves a version and waits for newer ones."""
        return self.model_copy(update={"live": live, "needs": live, "serial": self.serial + 1})


class SeenLease(NamedTuple):
    """A lease as the collector finds it."""

    replica: str
    needs: VersionId | None
    token: str
    """Another one whenever the lease was written."""
    is_readable: bool
    """A damaged lease needs everything, until it is ignored."""


def write_lease(store: Store, lease: Lease) -> None:
    """Write or renew a lease; its owner then reads the trash before it relies on it."""
    store.put(lease.key, records.to_bytes(lease))


def drop_lease(store: Store, replica: str) -> None:
    """Give a lease up, by its owner alone."""
    store.delete([f"{LEASES}{replica}.json"])


def seen_leases(store: Store) -> list[SeenLease]:
    """Every lease, by replica."""
    found: list[SeenLease] = []
    for info in store.list(LEASES):
        named = _KEY.fullmatch(info.key)
        if named is not None:
            seen = _seen(store, info.key, named[1])
            found += [] if seen is None else [seen]
    return found


def _seen(store: Store, key: str, replica: str) -> SeenLease | None:
    try:
        data = records.fetch(store, key)
    except MissingError:  # given up meanwhile
        return None
    except CorruptError:  # larger than any record
        return SeenLease(replica, None, key, is_readable=False)
    token = blake3(data).hexdigest()
    try:
        lease = records.parse(Lease, data, where=f"{store.url}/{key}")
    except CorruptError:
        return SeenLease(replica, None, token, is_readable=False)
    wanted = None if lease.needs is None else lease.needs.version
    return SeenLease(replica, wanted, token, lease.replica == replica)


class Protected(NamedTuple):
    """A plan that no collector takes apart while the lease is renewed."""

    edges: list[Edge]
    lease: Lease


def protected_plan(store: Store, lease: Lease, target: VersionId) -> Protected:
    """Plan from what is live, and hold a lease on all of it before it is relied on.

    Writes the lease, then reads the trash, then looks at what is there: a collector that missed
    the lease has left its tombstone to be seen, or is done and has left nothing to be planned.

    Args:
        store: the run's store.
        lease: the last one written, whose serial is continued.
        target: where to.

    Returns:
        The plan, and the lease that is in the store.

    Raises:
        StoreError: the store failed, or collectors took every plan apart.
        EtudeError: as plan().
    """
    for _ in range(_MAX_ATTEMPTS):
        edges = plan(store, lease.live, target, avoid=read_trash(store).keys)
        first = needs(edges)
        # Serial 0 was never written: nobody has seen that lease.
        if first is None or (lease.serial > 0 and first == lease.needs):
            return Protected(edges, lease)
        lease = lease.model_copy(update={"needs": first, "serial": lease.serial + 1})
        write_lease(store, lease)
    raise StoreError(f"{store.url}: what leads to version {target} is being deleted")
