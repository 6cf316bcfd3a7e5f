"""Who holds what where, also after silence and restarts."""

from hypothesis import given
from hypothesis import strategies as st

from etude.envserver.broker.launch_queue import BatchKey
from etude.envserver.broker.lease_ledger import LOST_AFTER_S, SETTLE_S, GrantedLease, LeaseLedger
from etude.v1 import environments_pb2

NOW_MS = 1_000_000


def held(name: str, index: int = 0, expires: int = NOW_MS) -> environments_pb2.HeldLease:
    lease = environments_pb2.Lease(lease_id=name, expires_unix_ms=expires)
    return environments_pb2.HeldLease(
        lease=lease, index=index, run_id="run", idempotency_key="key", request_digest="d"
    )


def beat(
    *leases: environments_pb2.HeldLease, node: str = "n", slots: int = 4, draining: bool = False
) -> environments_pb2.HeartbeatRequest:
    return environments_pb2.HeartbeatRequest(
        node_id=node, endpoint=f"{node}:1", slots=slots, held=leases, draining=draining
    )


def ledger_with(*names: str) -> LeaseLedger:
    ledger = LeaseLedger()
    ledger.heartbeat(beat(), now_s=0)
    for index, name in enumerate(names):
        ledger.grant(GrantedLease(held=held(name, index), node_id="n", granted_s=0))
    return ledger


def free(ledger: LeaseLedger) -> dict[str, int]:
    """Of the nodes that may get environments."""
    return {node.node_id: node.free for node in ledger.hosts if node.is_open}


def expired(ledger: LeaseLedger, now_unix_ms: int) -> list[str]:
    closing = ledger.expire(now_unix_ms=now_unix_ms, now_s=1)
    return [lease_id for each in closing for lease_id in each.lease_ids]


def test_a_lease_takes_a_slot_until_its_host_has_closed_it() -> None:
    ledger = ledger_with("a", "b")
    assert free(ledger) == {"n": 2}

    closing = ledger.end(["a"], now_s=1)
    assert closing == [("n", "n:1", ["a"])]
    assert free(ledger) == {"n": 2}

    ledger.confirm_closed("n", ["a"])
    assert free(ledger) == {"n": 3}


def test_a_host_that_missed_the_end_of_a_lease_hears_of_it_again() -> None:
    ledger = ledger_with("a")
    ledger.end(["a"], now_s=1)

    answer = ledger.heartbeat(beat(held("a")), now_s=2)
    assert list(answer.close_lease_ids) == ["a"]
    assert free(ledger) == {"n": 3}

    ledger.heartbeat(beat(), now_s=3)
    assert free(ledger) == {"n": 4}


def test_a_lease_that_comes_back_after_its_request_was_served_again_is_ended() -> None:
    ledger = ledger_with("a")
    ledger.remove_silent_hosts(now_s=60)
    ledger.heartbeat(beat(node="other"), now_s=61)
    ledger.grant(GrantedLease(held=held("b", 0), node_id="other", granted_s=61))

    answer = ledger.heartbeat(beat(held("a")), now_s=62)

    assert list(answer.close_lease_ids) == ["a"]
    assert set(ledger.leases) == {"b"}
    assert {
        index: each.lease.lease_id
        for index, each in ledger.of_batch(BatchKey("run", "key")).items()
    } == {0: "b"}


@given(
    ends=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    is_claimed=st.booleans(),
    grace_ms=st.integers(0, 9),
)
def test_of_two_leases_of_a_request_the_claimed_one_lives_else_the_one_that_ends_last(
    ends: tuple[int, int], *, is_claimed: bool, grace_ms: int
) -> None:
    ledger, until = LeaseLedger(), NOW_MS + grace_ms
    first, second = (held(name, expires=NOW_MS + end) for name, end in zip("ab", ends, strict=True))
    ledger.heartbeat(beat(first, node="n"), now_s=0, adopted_until_unix_ms=until)
    if is_claimed:
        ledger.renew(["a"], expires_unix_ms=NOW_MS, now_s=0)
    ledger.heartbeat(beat(second, node="o"), now_s=1, adopted_until_unix_ms=until)
    [living] = ledger.leases
    assert living == ("b" if ends[1] > ends[0] and not is_claimed else "a")
    for node, lease in (("n", first), ("o", second)):
        answer = ledger.heartbeat(beat(lease, node=node), now_s=2)
        assert list(answer.close_lease_ids) == [lease.lease.lease_id] * (
            lease.lease.lease_id != living
        )
    assert ledger.adopted_total == len(ledger.leases) + ledger.lost_total


def test_a_new_broker_learns_its_leases_from_the_hosts() -> None:
    ledger = LeaseLedger()
    ledger.heartbeat(beat(held("a", 3), held("b", 4)), now_s=0)

    living = ledger.of_batch(BatchKey("run", "key"))
    assert {index: granted.lease.lease_id for index, granted in living.items()} == {3: "a", 4: "b"}
    assert free(ledger) == {"n": 2}


def test_a_renewal_reaches_the_host_with_its_next_heartbeat() -> None:
    ledger = ledger_with("a")
    assert ledger.renew(["a", "x"], expires_unix_ms=NOW_MS + 7, now_s=1) == ["x"]

    answer = ledger.heartbeat(beat(held("a")), now_s=1)
    assert [(r.lease_id, r.expires_unix_ms) for r in answer.renewed] == [("a", NOW_MS + 7)]

    answer = ledger.heartbeat(beat(held("a", expires=NOW_MS + 7)), now_s=2)
    assert not answer.renewed


def test_a_lease_expires_at_its_end_and_not_before() -> None:
    ledger = ledger_with("a")

    assert expired(ledger, NOW_MS - 1) == []
    assert expired(ledger, NOW_MS) == ["a"]
    assert ledger.expired_total == 1


def test_a_lease_that_a_heartbeat_told_of_before_the_hosts_answer_is_one_lease() -> None:
    ledger = ledger_with()
    later = NOW_MS + 60_000
    ledger.heartbeat(beat(held("a")), now_s=0, adopted_until_unix_ms=later)
    ledger.grant(GrantedLease(held=held("a"), node_id="n", granted_s=1))
    assert (ledger.granted_total, ledger.adopted_total, ledger.of_run("run")) == (1, 0, 1)
    assert free(ledger) == {"n": 3}

    assert expired(ledger, NOW_MS) == ["a"]
    assert ledger.of_run("run") == 0
    assert expired(ledger, later) == []


def test_a_renewed_lease_outlives_its_first_end() -> None:
    ledger = ledger_with("a")
    ledger.renew(["a"], expires_unix_ms=NOW_MS + 9, now_s=1)

    assert expired(ledger, NOW_MS + 8) == []
    assert expired(ledger, NOW_MS + 9) == ["a"]


def test_a_renewal_may_also_shorten_a_lease() -> None:
    ledger = ledger_with("a")
    ledger.renew(["a"], expires_unix_ms=NOW_MS - 9, now_s=1)

    assert expired(ledger, NOW_MS - 9) == ["a"]


def test_a_lease_that_two_hosts_claim_lives_on_the_first() -> None:
    ledger = ledger_with("a")

    answer = ledger.heartbeat(beat(held("a"), node="other"), now_s=1)

    assert list(answer.close_lease_ids) == ["a"]
    assert ledger.leases["a"].node_id == "n"
    assert free(ledger) == {"n": 3, "other": 3}


def test_a_host_that_misses_three_heartbeats_is_lost_with_its_leases() -> None:
    ledger = ledger_with("a")

    assert ledger.remove_silent_hosts(now_s=LOST_AFTER_S) == []
    assert ledger.remove_silent_hosts(now_s=LOST_AFTER_S + 0.1) == ["n"]
    assert ledger.leases == {}
    assert free(ledger) == {}


def test_leases_of_a_lost_host_live_again_when_it_returns_with_them() -> None:
    ledger = ledger_with("a")
    ledger.renew(["a"], expires_unix_ms=NOW_MS + 7, now_s=1)
    ledger.remove_silent_hosts(now_s=10)

    answer = ledger.heartbeat(beat(held("a")), now_s=11)

    assert ledger.leases.keys() == {"a"}
    assert answer.renewed[0].expires_unix_ms == NOW_MS + 7


def test_a_lease_that_its_holder_was_told_is_gone_stays_gone() -> None:
    ledger = ledger_with("a")
    ledger.remove_silent_hosts(now_s=10)
    assert ledger.renew(["a"], expires_unix_ms=NOW_MS, now_s=10) == ["a"]

    answer = ledger.heartbeat(beat(held("a")), now_s=11)

    assert list(answer.close_lease_ids) == ["a"]
    assert ledger.leases == {}


def test_a_lost_lease_can_be_released() -> None:
    ledger = ledger_with("a")
    ledger.remove_silent_hosts(now_s=10)

    assert ledger.end(["a"], now_s=10) == []
    assert list(ledger.heartbeat(beat(held("a")), now_s=11).close_lease_ids) == ["a"]


def test_a_lease_that_its_host_does_not_know_is_dropped_once_it_had_time_to_appear() -> None:
    ledger = ledger_with("a")

    ledger.heartbeat(beat(), now_s=SETTLE_S)
    assert ledger.leases.keys() == {"a"}

    ledger.heartbeat(beat(), now_s=SETTLE_S + 0.1)
    assert ledger.leases == {}


def test_a_heartbeat_that_was_overtaken_by_a_later_one_ends_no_lease() -> None:
    ledger = ledger_with()
    late, newest = beat(), beat(held("a"))
    late.generation, newest.generation = 5, 6
    ledger.heartbeat(newest, now_s=0)

    answer = ledger.heartbeat(late, now_s=SETTLE_S + 1)

    assert answer.generation == 0
    assert ledger.leases.keys() == {"a"}
    assert ledger.lost_total == 0


def test_word_of_an_earlier_move_removes_no_host_that_came_back() -> None:
    ledger = ledger_with()
    moved, back = beat(), beat(held("a"))
    moved.generation, back.generation = 5, 6
    ledger.heartbeat(back, now_s=0)

    ledger.move_host(moved)
    assert ledger.leases.keys() == {"a"}

    moved.generation = 7
    ledger.move_host(moved)
    assert ledger.leases == {}


def test_a_host_whose_clock_went_back_is_heard_again_once_it_counts_as_silent() -> None:
    ledger = ledger_with()
    before, after = beat(held("a")), beat(held("a"))
    before.generation, after.generation = 6, 5
    ledger.heartbeat(before, now_s=0)
    ledger.remove_silent_hosts(now_s=LOST_AFTER_S + 0.1)

    assert ledger.heartbeat(after, now_s=LOST_AFTER_S + 0.2).generation == 5
    assert ledger.leases.keys() == {"a"}


def test_an_order_without_an_answer_leaves_no_environment() -> None:
    ledger = ledger_with()
    ledger.disown(["a"], now_s=0)

    assert list(ledger.heartbeat(beat(held("a")), now_s=1).close_lease_ids) == ["a"]
    assert ledger.leases == {}


def test_a_draining_or_suspect_host_gets_nothing_until_its_next_heartbeat() -> None:
    ledger = ledger_with()
    node = ledger.hosts.get("n")
    assert node is not None
    node.is_suspect = True
    assert free(ledger) == {}

    ledger.heartbeat(beat(), now_s=1)
    assert free(ledger) == {"n": 4}

    ledger.heartbeat(beat(draining=True), now_s=2)
    assert free(ledger) == {}


def test_what_ended_long_ago_is_forgotten() -> None:
    ledger = ledger_with("a", "b")
    ledger.end(["a"], now_s=1)
    ledger.forget_old(now_s=1e6)

    assert list(ledger.heartbeat(beat(held("b", 1)), now_s=1e6).close_lease_ids) == []


def test_an_adopted_lease_has_time_to_be_renewed() -> None:
    ledger = LeaseLedger()
    answer = ledger.heartbeat(beat(held("a")), now_s=0, adopted_until_unix_ms=NOW_MS + 60)

    assert expired(ledger, NOW_MS + 59) == []
    assert answer.renewed[0].expires_unix_ms == NOW_MS + 60
