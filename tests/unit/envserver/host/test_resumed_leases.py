"""A lease that expired, was kept by its node and resumed there is a lease again for its broker."""

import pytest

from etude.envserver.broker.lease_ledger import GrantedLease, LeaseLedger
from etude.v1 import environments_pb2

OVER_UNIX_MS = 1_000


def held(expires_unix_ms: int) -> environments_pb2.HeldLease:
    lease = environments_pb2.Lease(lease_id="a", expires_unix_ms=expires_unix_ms)
    return environments_pb2.HeldLease(lease=lease, run_id="run", idempotency_key="key")


def beat(
    ledger: LeaseLedger, *leases: environments_pb2.HeldLease, now_s: float = 2
) -> environments_pb2.HeartbeatResponse:
    told = environments_pb2.HeartbeatRequest(node_id="n", endpoint="n:1", slots=4, held=leases)
    return ledger.heartbeat(told, now_s=now_s)


@pytest.fixture
def ledger() -> LeaseLedger:
    """One whose only lease has expired."""
    made = LeaseLedger()
    beat(made, now_s=0)
    made.grant(GrantedLease(held=held(OVER_UNIX_MS), node_id="n", granted_s=0))
    (closing,) = made.expire(now_unix_ms=OVER_UNIX_MS, now_s=1)
    assert closing.lease_ids == ["a"]
    return made


def test_a_host_that_missed_the_end_is_told_of_it(ledger: LeaseLedger) -> None:
    assert list(beat(ledger, held(OVER_UNIX_MS)).close_lease_ids) == ["a"]
    assert ledger.leases == {}


def test_a_later_end_than_that_which_is_over_makes_it_a_lease_again(ledger: LeaseLedger) -> None:
    beat(ledger)

    assert list(beat(ledger, held(OVER_UNIX_MS + 1)).close_lease_ids) == []

    assert ledger.renew(["a"], expires_unix_ms=OVER_UNIX_MS + 5, now_s=3) == []
    (closing,) = ledger.expire(now_unix_ms=OVER_UNIX_MS + 5, now_s=4)
    assert closing.lease_ids == ["a"]
    assert list(beat(ledger, held(OVER_UNIX_MS + 5)).close_lease_ids) == ["a"]


def test_a_lease_that_was_given_back_is_never_one_again(ledger: LeaseLedger) -> None:
    beat(ledger, held(OVER_UNIX_MS + 1))
    ledger.end(["a"], now_s=3)

    assert list(beat(ledger, held(OVER_UNIX_MS + 9)).close_lease_ids) == ["a"]
    assert ledger.leases == {}


def test_what_is_forgotten_is_forgotten_as_a_whole(ledger: LeaseLedger) -> None:
    ledger.forget_old(now_s=1e9)

    assert list(beat(ledger, held(OVER_UNIX_MS)).close_lease_ids) == []
    assert "a" in ledger.leases
