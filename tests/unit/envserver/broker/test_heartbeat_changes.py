"""Heartbeats that tell changes alone leave a broker as whole ones would."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from etude.envserver.broker.lease_ledger import GrantedLease, LeaseLedger
from etude.envserver.host.leases.lease_changes import COMPLETE_EVERY, ConfirmedLeases
from etude.v1 import environments_pb2

NODES = ("n", "o")
NOW_MS = 1_000_000
names = st.sampled_from("abcdef")
nodes = st.sampled_from(NODES)


def make_held(name: str, *, index: int = 0, expires: int = NOW_MS) -> environments_pb2.HeldLease:
    lease = environments_pb2.Lease(lease_id=name, expires_unix_ms=expires)
    return environments_pb2.HeldLease(
        lease=lease, index=index, run_id="run", idempotency_key=name, request_digest="d"
    )


@dataclass
class Node:
    """A host: what it holds, and what each of two brokers has confirmed of it."""

    name: str
    held: dict[str, environments_pb2.HeldLease] = field(default_factory=dict)
    confirmed: ConfirmedLeases = field(default_factory=ConfirmedLeases)
    generation: int = 100

    def whole(self) -> environments_pb2.HeartbeatRequest:
        return environments_pb2.HeartbeatRequest(
            node_id=self.name, endpoint=self.name, slots=9, held=self.held.values()
        )

    def tell(
        self, ledger: LeaseLedger, now_s: float, *, is_answer_lost: bool
    ) -> tuple[environments_pb2.HeartbeatResponse, int]:
        """Send changes as a host does; returns the answer and how many leases were sent."""
        changes = self.confirmed.changes(self.held.values())
        self.generation += 1
        request = environments_pb2.HeartbeatRequest(
            node_id=self.name,
            endpoint=self.name,
            slots=9,
            held=changes.held,
            ended_lease_ids=changes.ended_lease_ids,
            generation=self.generation,
            base_generation=changes.base_generation,
        )
        answer = ledger.heartbeat(request, now_s=now_s)
        if not answer.generation:
            self.confirmed.forget()
            return self.tell(ledger, now_s, is_answer_lost=is_answer_lost)
        if not is_answer_lost:
            sent = [each.SerializeToString() for each in request.held]
            self.confirmed.confirm(changes, sent, self.generation)
        return answer, len(changes.held)


class TwoBrokers(RuleBasedStateMachine):
    """The same life of two hosts, told to one broker whole and to the other as changes."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.changes = LeaseLedger(), LeaseLedger()
        self.nodes = {name: Node(name) for name in NODES}
        self.now_s = 0.0
        for name in NODES:
            self.beat(name, is_answer_lost=False)

    @property
    def both(self) -> tuple[LeaseLedger, LeaseLedger]:
        return self.whole, self.changes

    @rule(name=names, node=nodes, index=st.integers(0, 1))
    def grant(self, name: str, node: str, index: int) -> None:
        lease_id = f"{name}{index}{self.now_s:g}"
        held = make_held(lease_id, index=index)
        self.nodes[node].held[lease_id] = held
        for ledger in self.both:
            copy = environments_pb2.HeldLease.FromString(held.SerializeToString())
            ledger.grant(GrantedLease(held=copy, node_id=node, granted_s=self.now_s))

    @rule(name=names, node=nodes)
    def hold_a_lease_of_a_predecessor(self, name: str, node: str) -> None:
        if all(name not in each.held for each in self.nodes.values()):
            self.nodes[node].held[name] = make_held(name)

    @rule(data=st.data(), ms=st.integers(1, 50_000))
    def renew(self, data: st.DataObject, ms: int) -> None:
        lease_id = self.drawn(data)
        gone = [ledger.renew([lease_id], expires_unix_ms=NOW_MS + ms, now_s=self.now_s)
                for ledger in self.both]  # fmt: skip
        assert gone[0] == gone[1]

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease_id = self.drawn(data)
        closing = [ledger.end([lease_id], now_s=self.now_s) for ledger in self.both]
        assert closing[0] == closing[1]

    @rule(ms=st.integers(0, 60_000))
    def expire(self, ms: int) -> None:
        over = [ledger.expire(now_unix_ms=NOW_MS + ms, now_s=self.now_s) for ledger in self.both]
        assert over[0] == over[1]

    @rule(data=st.data(), node=nodes)
    def lose_a_lease(self, data: st.DataObject, node: str) -> None:
        self.nodes[node].held.pop(self.drawn(data), None)

    @rule(data=st.data(), node=nodes, ms=st.integers(1, 99_000))
    def resume_a_lease_on_its_host(self, data: st.DataObject, node: str, ms: int) -> None:
        held = self.nodes[node].held.get(self.drawn(data))
        if held is not None:
            held.lease.expires_unix_ms = NOW_MS + ms

    @rule(seconds=st.sampled_from([1.0, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        silent = [ledger.remove_silent_hosts(now_s=self.now_s) for ledger in self.both]
        assert silent[0] == silent[1]

    @precondition(lambda self: len(self.whole.leases) < 30)
    @rule(name=nodes, is_answer_lost=st.booleans())
    def beat(self, name: str, *, is_answer_lost: bool) -> None:
        node = self.nodes[name]
        whole = self.whole.heartbeat(node.whole(), now_s=self.now_s)
        told, _ = node.tell(self.changes, self.now_s, is_answer_lost=is_answer_lost)
        assert sorted(whole.close_lease_ids) == sorted(told.close_lease_ids)
        assert {each.lease_id: each.expires_unix_ms for each in whole.renewed} == {
            each.lease_id: each.expires_unix_ms for each in told.renewed
        }
        assert self.describe(self.whole) == self.describe(self.changes)
        if is_answer_lost:
            return
        for lease_id in told.close_lease_ids:
            node.held.pop(lease_id, None)
        for each in told.renewed:
            node.held[each.lease_id].lease.expires_unix_ms = each.expires_unix_ms

    def drawn(self, data: st.DataObject) -> str:
        held = {lease_id for each in self.nodes.values() for lease_id in each.held}
        return data.draw(st.sampled_from(sorted(held | self.whole.leases.keys()) or ["none"]))

    def describe(self, ledger: LeaseLedger) -> object:
        leases = {
            lease_id: (each.node_id, each.lease.expires_unix_ms, each.is_claimed)
            for lease_id, each in ledger.leases.items()
        }
        free = {host.node_id: host.free for host in ledger.hosts}
        totals = (
            ledger.granted_total,
            ledger.adopted_total,
            ledger.released_total,
            ledger.expired_total,
            ledger.lost_total,
        )
        assert sum(ledger.began.values()) == len(ledger.leases)
        return leases, free, totals


TestTwoBrokers = TwoBrokers.TestCase
TestTwoBrokers.settings = settings(stateful_step_count=40)


def test_a_heartbeat_tells_nothing_of_leases_that_did_not_change() -> None:
    ledger, node = LeaseLedger(), Node("n")
    node.held = {name: make_held(name) for name in "abc"}
    assert [node.tell(ledger, 0, is_answer_lost=False)[1] for _ in range(3)] == [3, 0, 0]
    del node.held["a"]
    node.held["d"] = make_held("d")
    assert node.tell(ledger, 0, is_answer_lost=False)[1] == 1
    assert ledger.hosts[0].reported == {"b", "c", "d"}


def test_all_leases_are_told_to_a_broker_that_started_and_once_in_a_while() -> None:
    ledger, node = LeaseLedger(), Node("n")
    node.held = {name: make_held(name) for name in "abc"}
    node.tell(ledger, 0, is_answer_lost=False)
    assert node.tell(LeaseLedger(), 0, is_answer_lost=False)[1] == 3
    sent = [node.tell(ledger, 0, is_answer_lost=False)[1] for _ in range(2 * COMPLETE_EVERY + 1)]
    assert sent == [3, *[0] * (COMPLETE_EVERY - 1), 3, *[0] * (COMPLETE_EVERY - 1), 3]
