"""Nodes without environments behind their leases: they open, close and report them over gRPC."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from typing_extensions import override

from etude.common.pools.broker_shards import choose_shard
from etude.common.rpc import channels
from etude.common.rpc import server as rpc_server
from etude.v1 import environments_pb2, environments_pb2_grpc

BEAT_S = 1.0
BEAT_DEADLINE_S = 2.0
UNHEARD_BEFORE_MOVE = 2
AVOID_S = 10.0
"""As the real host has them."""


@dataclass(slots=True)
class SimulatedNode:
    """The leases of one node, and those of its broker's that changed since it confirmed."""

    name: str
    slots: int
    held: dict[str, environments_pb2.HeldLease] = field(default_factory=dict)
    changed: dict[str, environments_pb2.HeldLease] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    present: str = ""
    """Target of its broker."""
    present_name: str = ""
    shards: Mapping[str, str] = field(default_factory=dict)
    """Targets by the names of brokers, as its broker said last."""
    confirmed: int = 0
    generation: int = field(default_factory=time.time_ns)
    num_unheard: int = 0
    silent_until_s: dict[str, float] = field(default_factory=dict)

    def open(self, held: environments_pb2.HeldLease) -> bool:
        """Hold a lease; False if there is no slot."""
        if len(self.held) >= self.slots:
            return False
        self.held[held.lease.lease_id] = self.changed[held.lease.lease_id] = held
        return True

    def close(self, lease_id: str) -> None:
        """Hold a lease no more."""
        if self.held.pop(lease_id, None) is not None:
            self.changed.pop(lease_id, None)
            self.ended.add(lease_id)

    def candidates(self, seeds: Sequence[str]) -> list[str]:
        """Targets to try, the best first."""
        now_s = time.monotonic()
        known = self.shards or {each: each for each in seeds}
        left = {n: at for n, at in known.items() if self.silent_until_s.get(at, 0.0) <= now_s}
        ranked = []
        while left:
            ranked.append(left.pop(choose_shard(self.name, sorted(left))))
        return list(dict.fromkeys([*ranked, *seeds]))


@dataclass(slots=True)
class SimulatedNodes(environments_pb2_grpc.EnvNodeServiceServicer):
    """All nodes behind one server: brokers name the node that they mean."""

    nodes: dict[str, SimulatedNode]
    seeds: Sequence[str]
    endpoint: str = ""
    beat_bytes: int = 0
    num_beats: int = 0
    num_moves: int = 0
    _stubs: "dict[str, environments_pb2_grpc.EnvBrokerServiceAsyncStub]" = field(
        default_factory=dict
    )
    _channels: list[grpc.aio.Channel] = field(default_factory=list)
    _node_of: dict[str, SimulatedNode] = field(default_factory=dict)
    """By lease."""

    @override
    async def OpenEnvironments(
        self, request: environments_pb2.OpenEnvironmentsRequest, context: object
    ) -> environments_pb2.OpenEnvironmentsResponse:
        node = self.nodes[request.node_id]
        answer = environments_pb2.OpenEnvironmentsResponse()
        for held in request.leases:
            held.lease.endpoint = self.endpoint
            if node.open(held):
                self._node_of[held.lease.lease_id] = node
                answer.outcomes.add(index=held.index, lease=held.lease)
            else:
                answer.outcomes.add(index=held.index).failure.reason = "NoSlot"
        return answer

    @override
    async def CloseEnvironments(
        self, request: environments_pb2.CloseEnvironmentsRequest, context: object
    ) -> environments_pb2.CloseEnvironmentsResponse:
        self._close(request.lease_ids)
        return environments_pb2.CloseEnvironmentsResponse()

    def _close(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            node = self._node_of.pop(lease_id, None)
            if node is not None:
                node.close(lease_id)

    async def beat_for_ever(self) -> None:
        """Heartbeats of every node once a second, each at its own moment."""
        count = len(self.nodes)
        beats = (self._beat_for_ever(n, place / count) for place, n in enumerate(self._all()))
        await asyncio.gather(*beats)

    def _all(self) -> list[SimulatedNode]:
        return list(self.nodes.values())

    async def _beat_for_ever(self, node: SimulatedNode, delay_s: float) -> None:
        due_s = time.monotonic() + delay_s
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            due_s = max(due_s + BEAT_S, time.monotonic())
            await self._beat(node)

    async def _beat(self, node: SimulatedNode) -> None:
        for target in node.candidates(self.seeds):
            if await self._send(node, target):
                return
            if target == node.present and node.num_unheard < UNHEARD_BEFORE_MOVE:
                return

    async def _send(self, node: SimulatedNode, target: str) -> bool:
        is_present = target == node.present
        base = node.confirmed if is_present else 0
        answer = await self._ask(node, target, base)
        if answer is not None and base and not answer.generation:
            answer = await self._ask(node, target, 0)
        if answer is None:
            node.num_unheard += is_present
            if not is_present or node.num_unheard >= UNHEARD_BEFORE_MOVE:
                node.silent_until_s[target] = time.monotonic() + AVOID_S
            return False
        last, was_unheard = node.present, node.num_unheard
        node.shards = {each.name: each.target for each in answer.shards}
        node.present, node.num_unheard = target, 0
        node.present_name = next(iter(node.shards), "")
        if last and not is_present:
            self.num_moves += 1
            if not was_unheard:
                await self._leave(node, last)
        self._close(answer.close_lease_ids)
        for each in answer.renewed:
            held = node.held.get(each.lease_id)
            if held is not None:
                held.lease.expires_unix_ms = each.expires_unix_ms
                node.changed[each.lease_id] = held
        return True

    async def _ask(
        self, node: SimulatedNode, target: str, base: int
    ) -> environments_pb2.HeartbeatResponse | None:
        node.generation += 1
        changed = dict(node.changed) if base else dict(node.held)
        ended = set(node.ended) if base else set[str]()
        request = environments_pb2.HeartbeatRequest(
            node_id=node.name,
            endpoint=self.endpoint,
            driver="simulated",
            isolation=environments_pb2.ISOLATION_STRONG,
            slots=node.slots,
            held=changed.values(),
            ended_lease_ids=ended,
            generation=node.generation,
            base_generation=base,
        )
        try:
            answer = await self._stub(target).Heartbeat(request, timeout=BEAT_DEADLINE_S)
        except grpc.aio.AioRpcError:
            return None
        self.num_beats += 1
        self.beat_bytes += request.ByteSize() + answer.ByteSize()
        if answer.generation == request.generation:
            node.confirmed = request.generation
            # What changed meanwhile is in the next one.
            for lease_id, held in changed.items():
                if node.changed.get(lease_id) is held:
                    del node.changed[lease_id]
            node.ended -= ended if base else node.ended - node.held.keys()
        return answer

    async def _leave(self, node: SimulatedNode, last: str) -> None:
        request = environments_pb2.HeartbeatRequest(
            node_id=node.name,
            endpoint=self.endpoint,
            generation=node.generation,
            moved_to=node.present_name,
        )
        try:
            await self._stub(last).Heartbeat(request, timeout=BEAT_DEADLINE_S)
        except grpc.aio.AioRpcError:
            return  # it forgets the node by its silence

    def _stub(self, target: str) -> "environments_pb2_grpc.EnvBrokerServiceAsyncStub":
        if target not in self._stubs:
            self._channels.append(channels.dial(target, max_backoff_ms=1_000))
            self._stubs[target] = environments_pb2_grpc.EnvBrokerServiceStub(self._channels[-1])
        return self._stubs[target]

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels:
            await channel.close()


def make_nodes(count: int, slots: int, seeds: Sequence[str]) -> SimulatedNodes:
    """So many nodes of so many slots."""
    nodes = {f"node-{n}": SimulatedNode(f"node-{n}", slots) for n in range(count)}
    return SimulatedNodes(nodes, seeds)  # type: ignore[abstract]  # the other calls never come


async def serve(nodes: SimulatedNodes) -> rpc_server.Server:
    """Listen for the orders of brokers."""
    server = rpc_server.Server([])
    environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(nodes, server.grpc_server)
    await server.start()
    nodes.endpoint = f"127.0.0.1:{server.port}"
    return server
