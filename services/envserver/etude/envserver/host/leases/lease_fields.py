"""Fields of a lease about its driver: isolation, start, capabilities."""

import hmac
import time
from collections.abc import Mapping

from etude.envserver.drivers.base import Driver, IsolationStrength, StartKind
from etude.v1 import environments_pb2

ISOLATION: Mapping[IsolationStrength, environments_pb2.Isolation] = {
    IsolationStrength.WEAK: environments_pb2.ISOLATION_WEAK,
    IsolationStrength.MODERATE: environments_pb2.ISOLATION_MODERATE,
    IsolationStrength.STRONG: environments_pb2.ISOLATION_STRONG,
}
STARTS: Mapping[StartKind, environments_pb2.Start] = {
    StartKind.COPY: environments_pb2.START_COPY,
    StartKind.SPAWN: environments_pb2.START_SPAWN,
    StartKind.SHELL: environments_pb2.START_SHELL,
    # To a client it is the same: nothing has to be kept ready for the next.
    StartKind.SPLIT: environments_pb2.START_PAUSED_CLONE,
    StartKind.PAUSED_CLONE: environments_pb2.START_PAUSED_CLONE,
    StartKind.DELTA: environments_pb2.START_DELTA,
}


def seconds_left(lease: environments_pb2.Lease) -> float:
    """Seconds until the lease ends, by the wall clock."""
    return lease.expires_unix_ms / 1000 - time.time()


def is_same_token(token: str, *known: str) -> bool:
    """True if a token is one of the known ones that are not empty."""
    return any(each and hmac.compare_digest(token.encode(), each.encode()) for each in known)


def fill_lease(lease: environments_pb2.Lease, driver: Driver, start: StartKind | None) -> None:
    """Fill in the fields of a lease that describe its environment."""
    lease.driver = driver.name
    lease.isolation = ISOLATION[driver.strength]
    if start is not None:
        lease.start = STARTS[start]
    caps = driver.caps
    lease.caps.CopyFrom(
        environments_pb2.Caps(
            files=caps.files,
            memory=caps.memory,
            freeze=caps.freeze,
            portable=caps.portable,
            egress=caps.egress,
        )
    )
