"""CPU time of a broker for one heartbeat: every lease in it, or those alone that changed."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etude.envserver.broker.lease_ledger import LeaseLedger
from etude.v1 import environments_pb2

NODES, LEASES = 500, 150
"""Of the sizes at which 2,000 nodes hold 300,000 environments."""
CHANGED = 5
"""Leases of a node that begin in a second when one lasts half a minute."""
REPEATS = 5


class HeartbeatCosts(NamedTuple):
    """Of one heartbeat of a node with LEASES leases."""

    whole_ms: float
    changes_ms: float
    whole_bytes: int
    changes_bytes: int

    @property
    def ratio(self) -> float:
        return self.whole_ms / self.changes_ms


def measure() -> HeartbeatCosts:
    """The least CPU time of some rounds over all nodes, decoding included."""
    ledger = LeaseLedger()
    held = {f"node-{n}": [_held(f"node-{n}", i) for i in range(LEASES)] for n in range(NODES)}
    whole = _requests(held, LEASES)
    whole_ms = min(_round_ms(ledger, whole) for _ in range(REPEATS))
    _round_ms(ledger, _requests(held, LEASES, generation=1))
    rounds_ms, changes = [], whole
    for base in range(1, REPEATS + 1):
        changes = _requests(held, CHANGED, generation=base + 1, base=base)
        rounds_ms.append(_round_ms(ledger, changes))
    return HeartbeatCosts(
        whole_ms, min(rounds_ms), sum(map(len, whole)) // NODES, sum(map(len, changes)) // NODES
    )


def _requests(
    held: Mapping[str, Sequence[environments_pb2.HeldLease]],
    count: int,
    *,
    generation: int = 0,
    base: int = 0,
) -> list[bytes]:
    """A heartbeat of each node with its first leases, encoded."""
    return [
        environments_pb2.HeartbeatRequest(
            node_id=name,
            endpoint=name,
            slots=2 * LEASES,
            held=leases[:count],
            generation=generation,
            base_generation=base,
        ).SerializeToString()
        for name, leases in held.items()
    ]


def _round_ms(ledger: LeaseLedger, requests: Sequence[bytes]) -> float:
    started_s = time.process_time()
    for encoded in requests:
        ledger.heartbeat(environments_pb2.HeartbeatRequest.FromString(encoded), now_s=0)
    return 1000 * (time.process_time() - started_s) / len(requests)


def _held(node: str, index: int) -> environments_pb2.HeldLease:
    lease = environments_pb2.Lease(
        lease_id=f"{node}-{index:032}",
        endpoint="10.0.0.1:9000",
        control_token="0" * 32,
        expires_unix_ms=10**13,
    )
    return environments_pb2.HeldLease(
        lease=lease,
        index=index,
        run_id="run",
        idempotency_key=f"{node}-{index // 8}",
        request_digest="0" * 32,
    )
