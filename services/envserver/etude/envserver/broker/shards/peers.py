"""The other brokers of a pool: found by their addresses, alive while they report their loads."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from etude.common.errors import InvalidFieldError, UserError
from etude.common.pools.broker_shards import choose_shard, shard_label
from etude.common.rpc import channels
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.v1 import broker_peers_pb2, broker_peers_pb2_grpc, environments_pb2

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5
REPORT_DEADLINE_S = 1.0
DEAD_AFTER_S = 2.5
"""A broker that was not heard for so long is dead: its hosts find another meanwhile."""
MOVE_S = 8.0
"""Hosts of a dead broker have found another within this."""
FORGET_S = 60.0
"""So long a dead broker counts only if it reports itself."""
MAX_BACKOFF_MS = 500


@dataclass(slots=True, kw_only=True)
class Peer:
    """Another broker of the pool."""

    name: str
    target: str
    load: broker_peers_pb2.ShardLoad
    """As it reported last, less the environments asked of it since."""
    heard_s: float


@dataclass(slots=True, kw_only=True)
class Peers:
    """All brokers of a pool as one of them knows them."""

    name: str
    """Of this broker."""
    addresses: BrokerAddresses | None = None
    """By which others are found; None: this broker is the only one."""
    make_load: Callable[[], broker_peers_pb2.ShardLoad] = broker_peers_pb2.ShardLoad
    target: str = ""
    """Where others reach this broker, once it listens."""
    lost_s: float = -math.inf
    """When a broker was lost last."""
    started_s: float = field(default_factory=time.monotonic)
    _has_met: bool = False
    """True once every other broker has answered in one exchange."""
    _peers: dict[str, Peer] = field(default_factory=dict)
    _dead_s: dict[str, float] = field(default_factory=dict)
    """When each lost broker was lost."""
    _own_targets: set[str] = field(default_factory=set)
    """Addresses at which this broker itself has answered."""
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    @property
    def living(self) -> list[Peer]:
        """The other brokers that answer."""
        return list(self._peers.values())

    @property
    def shards(self) -> list[environments_pb2.BrokerShard]:
        """All living brokers, this one first; none before it listens."""
        if not self.target:
            return []
        others = (
            environments_pb2.BrokerShard(name=each.name, target=each.target) for each in self.living
        )
        return [environments_pb2.BrokerShard(name=self.name, target=self.target), *others]

    def home(self, key: str) -> Peer | None:
        """The broker that a batch belongs to; None for this one."""
        if not self._peers:
            return None
        return self._peers.get(choose_shard(key, [self.name, *self._peers]))

    def by_label(self, label: str) -> Peer | None:
        """The living broker with this label."""
        return next((each for each in self.living if shard_label(each.name) == label), None)

    def held_elsewhere(self, run_id: str) -> int:
        """Environments that a run holds or waits for at the other brokers."""
        return sum(each.load.held_by_run.get(run_id, 0) for each in self.living)

    def settles_in_s(self, *, now_s: float) -> float:
        """Seconds until the hosts of the broker that was lost last belong to others; 0 if so."""
        return max(0.0, self.lost_s + MOVE_S - now_s)

    def has_met(self, *, now_s: float) -> bool:
        """True if no other broker is left that this one has not heard since it started.

        One that does not answer for so long is dead, and its address only remembered.
        """
        return self.addresses is None or self._has_met or now_s - self.started_s > MOVE_S

    def stub(self, peer: Peer) -> "broker_peers_pb2_grpc.BrokerPeerServiceAsyncStub":
        """Client of another broker."""
        return self._stub(peer.target)

    def record_load(self, load: broker_peers_pb2.ShardLoad, *, now_s: float) -> None:
        """Record that another broker reported its load.

        Raises:
            InvalidFieldError: it has this broker's name.
        """
        shard = load.shard
        if not shard.name or not shard.target:
            raise InvalidFieldError("load.shard", "a broker needs a name and a target")
        if shard.name == self.name:
            if shard.target != self.target:
                what = f"{shard.name!r} is the broker at {self.target}; {shard.target} has it too"
                raise InvalidFieldError("load.shard.name", what)
            return
        if shard.name not in self._peers:
            log.info("broker %s at %s joined", shard.name, shard.target)
            self._dead_s.pop(shard.name, None)
        self._peers[shard.name] = Peer(
            name=shard.name, target=shard.target, load=load, heard_s=now_s
        )

    def remove_dead(self, *, now_s: float) -> list[str]:
        """Remove the brokers that have not reported; returns their names."""
        dead = [each for each in self.living if now_s - each.heard_s > DEAD_AFTER_S]
        for each in dead:
            log.warning("broker %s at %s is lost", each.name, each.target)
            del self._peers[each.name]
            self.lost_s = self._dead_s[each.name] = now_s
        return [each.name for each in dead]

    async def run(self, stop: asyncio.Event) -> None:
        """Exchange loads with all others until told to stop."""
        if self.addresses is None:
            return
        while not stop.is_set():
            await self.exchange()
            self.remove_dead(now_s=time.monotonic())
            try:
                async with asyncio.timeout(REPORT_EVERY_S):
                    await stop.wait()
            except TimeoutError:
                continue

    async def exchange(self) -> None:
        """Report this broker's load to every other one, and record theirs."""
        known = [each.target for each in self.living]
        found = () if self.addresses is None else await self.addresses.targets()
        targets = dict.fromkeys([*known, *found])
        request = broker_peers_pb2.ReportLoadRequest(load=self.make_load())
        request.load.shard.name, request.load.shard.target = self.name, self.target
        others = [each for each in targets if each not in self._own_targets | {self.target}]
        answered = await asyncio.gather(*(self._report(each, request) for each in others))
        self._has_met = self._has_met or all(answered)

    async def stop(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()

    async def _report(self, target: str, request: broker_peers_pb2.ReportLoadRequest) -> bool:
        """Report to one broker; True if it has answered."""
        try:
            answer = await self._stub(target).ReportLoad(request, timeout=REPORT_DEADLINE_S)
            self._record_answer(target, answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                log.warning("broker %s refuses this one: %s", target, error.details())
        except (InvalidFieldError, UserError) as error:
            log.warning("broker at %s: %s", target, error)
        else:
            return True
        return False

    def _record_answer(self, target: str, answer: broker_peers_pb2.ReportLoadResponse) -> None:
        if answer.load.shard.name == self.name:
            self._own_targets.add(target)
            return
        self.record_load(answer.load, now_s=time.monotonic())
        now_s = time.monotonic()
        for shard in answer.shards:
            is_dead = now_s - self._dead_s.get(shard.name, -math.inf) < FORGET_S
            if shard.name != self.name and shard.name not in self._peers and not is_dead:
                # Another broker says so: it is asked at once, and removed unless it answers.
                heard_s = now_s - DEAD_AFTER_S + 2 * REPORT_EVERY_S
                self.record_load(broker_peers_pb2.ShardLoad(shard=shard), now_s=heard_s)

    def _stub(self, target: str) -> "broker_peers_pb2_grpc.BrokerPeerServiceAsyncStub":
        if target not in self._channels:
            self._channels[target] = channels.dial(target, max_backoff_ms=MAX_BACKOFF_MS)
        return broker_peers_pb2_grpc.BrokerPeerServiceStub(self._channels[target])
