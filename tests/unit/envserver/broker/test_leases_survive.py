"""Whatever happens in whatever order, leases add up and none lives twice."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.support.environments.brokers import request
from typing_extensions import override

from etude.common.api.pool.lease_classes import LeaseClass, LeaseClassName
from etude.common.api.pool.spec import EnvPoolSpec, LeasePolicy, Template
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.lease_ledger import LOST_AFTER_S, SETTLE_S
from etude.v1 import environments_pb2

NODES = ("n1", "n2", "n3")
SLOTS = 4
FLOOR = LeaseClass(name=LeaseClassName.SERVING, floor_slots=5)
SPEC = EnvPoolSpec(templates=(Template(name="python"),), lease=LeasePolicy(classes=(FLOOR,)))
keys = st.sampled_from("abcd")
nodes = st.sampled_from(NODES)


@dataclass(slots=True, kw_only=True)
class HastyNodes(MemoryHostClient):
    """Nodes of which some tell of a lease by a heartbeat before their answer is read."""

    hear: Callable[[environments_pb2.HeartbeatRequest], object]
    hasty: set[str] = field(default_factory=set)

    @override
    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[environments_pb2.LaunchBatchResponse]:
        answers = await MemoryHostClient.open(self, endpoint, request)
        if endpoint in self.hasty:
            self.hear(self.heartbeat(endpoint))
        return answers


class Pool(RuleBasedStateMachine):
    """A broker, three nodes, clients that come and go, and everything that can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.nodes = HastyNodes(slots=SLOTS, hear=self.hear)
        self.broker = self.started()
        self.asked: dict[str, environments_pb2.LaunchBatchRequest] = {}
        self.clients: list[asyncio.Task[None]] = []
        self.told: dict[str, dict[int, str]] = {}
        """What clients were given, by key and index, unless it has ended since."""
        self.beat()

    def hear(self, beat: environments_pb2.HeartbeatRequest) -> None:
        """Whichever broker there is hears it."""
        self.broker.heartbeat(beat)

    def started(self) -> Broker:
        return Broker(SPEC, self.nodes, started_s=-REBUILD_S)

    def do(self, work: Coroutine[Any, Any, Any]) -> None:
        self.loop.run_until_complete(work)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def beat(self, *names: str) -> None:
        async def all_of_them() -> None:
            for name in names or NODES:
                if name not in self.nodes.failing:
                    answer = self.broker.heartbeat(self.nodes.heartbeat(name))
                    await self.nodes.close(name, answer.close_lease_ids)
            await self.settle()

        self.do(all_of_them())

    def forget(self, lease_ids: set[str]) -> None:
        for found in self.told.values():
            for index in [i for i, lease_id in found.items() if lease_id in lease_ids]:
                del found[index]

    async def client(self, key: str, asked: environments_pb2.LaunchBatchRequest) -> None:
        async for outcome in self.broker.launch(asked):
            if outcome.HasField("lease"):
                known = self.told.setdefault(key, {}).get(outcome.index)
                assert known in {None, outcome.lease.lease_id}, "another lease for the same request"
                self.told[key][outcome.index] = outcome.lease.lease_id

    @rule(key=keys, count=st.integers(1, 5), group=st.sampled_from(["", "g"]))
    def launch(self, key: str, count: int, group: str) -> None:
        """A client asks, perhaps once more."""
        new = request(key, count, run_id=f"run-{key in 'ab'}", group_id=group)
        if key in "cd":
            new.lease_class = environments_pb2.LEASE_CLASS_SERVING
        asked = self.asked.setdefault(key, new)
        self.end_clients(lambda task: task.done())
        if any(task.get_name() == key for task in self.clients):
            return

        async def begin() -> None:
            self.clients.append(asyncio.create_task(self.client(key, asked), name=key))
            await self.settle()

        self.do(begin())

    @rule(key=keys)
    def leave(self, key: str) -> None:
        self.end_clients(lambda task: task.get_name() == key)

    @rule(key=keys)
    def release(self, key: str) -> None:
        ids = set(self.told.get(key, {}).values())
        self.forget(ids)
        self.do(self.broker.release(sorted(ids)))
        self.do(self.settle())

    @rule(key=keys)
    def expire(self, key: str) -> None:
        ids = set(self.told.get(key, {}).values())
        self.forget(ids)
        self.broker.ledger.renew(sorted(ids), expires_unix_ms=1, now_s=0)
        self.do(self.broker.tick())
        self.do(self.settle())

    @rule(name=nodes)
    def fail(self, name: str) -> None:
        self.nodes.failing.add(name)

    @rule(name=nodes)
    def mend(self, name: str) -> None:
        self.nodes.failing.discard(name)
        self.beat(name)

    @rule(name=nodes)
    def hurry(self, name: str) -> None:
        self.nodes.hasty ^= {name}

    @rule(name=nodes)
    def restart_empty(self, name: str) -> None:
        """The node comes back without its leases."""
        self.forget(set(self.nodes.held.pop(name, {})))
        for granted in self.broker.ledger.leases.values():
            granted.granted_s -= 2 * SETTLE_S
        self.mend(name)

    @rule(name=nodes)
    def silence(self, name: str) -> None:
        node = self.broker.ledger.hosts.get(name)
        if node is not None:
            self.forget(set(node.leases))
            time.sleep(0.001)  # leases are told apart by the milliseconds of their ends
            node.seen_s -= 2 * LOST_AFTER_S
            self.do(self.broker.tick())

    @rule(name=nodes, index=st.integers(0, SLOTS))
    def take_turns(self, name: str, index: int) -> None:
        """One environment of a node is in a turn, and is not paused."""
        self.nodes.busy = set(sorted(self.nodes.held.get(name, {}))[index : index + 1])

    @rule(late_s=st.sampled_from([0.0, 10.0]))
    def preempt(self, late_s: float) -> None:
        """What is needed below a floor is taken from others."""

        async def work() -> None:
            self.broker.preemptor.preempt(now_s=time.monotonic() + late_s)
            await self.settle()

        self.do(work())

    @rule()
    def crash(self) -> None:
        """The streams break; the next broker hears every node that works before it grants."""
        self.end_clients(lambda _: True)
        for name in self.nodes.failing:
            self.forget(set(self.nodes.held.get(name, {})))
        self.do(self.broker.dispatcher.stop())
        self.broker = self.started()
        self.beat()

    @rule()
    def beats(self) -> None:
        self.beat()

    def end_clients(self, which: Any) -> None:
        ending = [task for task in self.clients if which(task)]
        for task in ending:
            task.cancel()
        self.clients = [task for task in self.clients if task not in ending]

        async def ended() -> None:
            for outcome in await asyncio.gather(*ending, return_exceptions=True):
                assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome

        self.do(ended())

    @invariant()
    def every_lease_is_accounted_for(self) -> None:
        ledger = self.broker.ledger
        ended = ledger.released_total + ledger.expired_total + ledger.lost_total
        assert ledger.granted_total + ledger.adopted_total == len(ledger.leases) + ended

    @invariant()
    def no_lease_is_on_two_nodes(self) -> None:
        ids = [lease_id for held in self.nodes.held.values() for lease_id in held]
        assert len(ids) == len(set(ids))

    @invariant()
    def no_node_holds_more_than_its_slots(self) -> None:
        for held in self.nodes.held.values():
            assert sum(not each.preempted for each in held.values()) <= SLOTS

    @invariant()
    def no_rollout_waits_while_its_node_has_room(self) -> None:
        self.beat()
        self.beat()  # slots of one node make room for what waits on another
        if not self.broker.preemptor.num_spare(now_s=time.monotonic()):
            return  # free slots are kept for people
        for node in self.broker.ledger.hosts:
            if node.node_id not in self.nodes.failing and node.is_open:
                assert not (node.preempted and node.free), "a preempted lease is not resumed"

    @invariant()
    def whoever_has_a_slot_is_known(self) -> None:
        slots = self.broker.ledger.slots
        leases = self.broker.ledger.leases.values()
        preempted = {each.lease.lease_id for each in leases if each.held.preempted}
        assert preempted == {each for node in self.broker.ledger.hosts for each in node.preempted}
        assert slots.num_preempted == len(preempted)
        assert slots.by_class.total() == len(leases) - len(preempted)

    @invariant()
    def counts_of_runs_and_nodes_are_those_of_the_leases(self) -> None:
        ledger = self.broker.ledger
        for run in ("run-True", "run-False"):
            of_run = [g for g in ledger.leases.values() if g.key.run_id == run]
            assert ledger.of_run(run) == len(of_run)
        for node in ledger.hosts:
            here = {i for i, g in ledger.leases.items() if g.node_id == node.node_id}
            assert node.leases == here
            assert node.opening == 0

    @override
    def teardown(self) -> None:
        """Once everything works again, whoever still waits is served or told."""
        self.end_clients(lambda _: True)
        assert len(self.broker.queue) == 0
        assert len(self.broker.streams) == 0
        self.do(self.broker.dispatcher.stop())
        self.loop.close()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
