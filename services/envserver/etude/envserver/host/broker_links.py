"""Brokers of a host's pool: the one that the host belongs to, and the others in case it dies."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc

from etude.common.pools.broker_shards import choose_shard
from etude.common.rpc import channels
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.common.tls.transport import TransportSecurity
from etude.v1 import environments_pb2, environments_pb2_grpc

MAX_BACKOFF_MS = 1_000
"""A broker that comes back waits 2 s for its hosts before it grants anything."""
AVOID_S = 10.0
"""A broker that did not answer is tried again after this, unless there is no other."""


@dataclass(slots=True)
class BrokerLinks:
    """Channels of one host to the brokers of its pool."""

    addresses: BrokerAddresses
    node_id: str
    security: TransportSecurity | None = None
    """Certificates or none; this process's default unless given."""
    present: str = ""
    """Target of the broker that the host belongs to; empty before one has taken a heartbeat in."""
    present_name: str = ""
    """Name of that broker."""
    _shards: dict[str, str] = field(default_factory=dict)
    """Targets by the names of living brokers, as the present one said last."""
    _silent_until_s: dict[str, float] = field(default_factory=dict)
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)

    async def candidates(self, *, now_s: float) -> list[str]:
        """Targets to send a heartbeat to until one answers, the best first."""
        left = {name: at for name, at in self._shards.items() if not self._is_silent(at, now_s)}
        ranked = []
        while left:
            ranked.append(left.pop(choose_shard(self.node_id, sorted(left))))
        found = await self.addresses.targets()
        seeds = {each: each for each in found if each not in self._shards.values()}
        while seeds:
            ranked.append(seeds.pop(choose_shard(self.node_id, sorted(seeds))))
        ranked += [each for each in self._shards.values() if each not in ranked]
        # An address of the pool may be another one of the present broker.
        if self.present and (not ranked or ranked[0] not in self._shards.values()):
            ranked.insert(0, self.present)
        return list(dict.fromkeys(ranked))

    def record_answer(self, shards: Iterable[environments_pb2.BrokerShard]) -> None:
        """Record the living brokers, of which the first has answered.

        A broker of an earlier release tells of none.
        """
        self._shards = {each.name: each.target for each in shards}
        self.present_name = next(iter(self._shards), "")

    def record_silence(self, target: str, *, now_s: float) -> None:
        """Avoid a broker for a while."""
        self._silent_until_s[target] = now_s + AVOID_S

    def stub(self, target: str) -> "environments_pb2_grpc.EnvBrokerServiceAsyncStub":
        """Client of one broker."""
        if target not in self._channels:
            self._channels[target] = channels.dial(
                target, max_backoff_ms=MAX_BACKOFF_MS, security=self.security
            )
        return environments_pb2_grpc.EnvBrokerServiceStub(self._channels[target])

    async def close(self) -> None:
        """Close every channel."""
        for channel in self._channels.values():
            await channel.close()

    def _is_silent(self, target: str, now_s: float) -> bool:
        return self._silent_until_s.get(target, now_s) > now_s
