"""gRPC channel to all brokers of a pool: each call goes to one that lives, if it can the right one.

Any broker takes any call and hands it on; the right one saves that.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from typing_extensions import override

from etude.common.pools.broker_shards import batch_key, choose_shard
from etude.common.rpc import channels
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.v1 import environments_pb2, environments_pb2_grpc

log = logging.getLogger(__name__)

LIST_EVERY_S = 5.0
AVOID_S = 5.0
"""A broker that did not answer is not asked for so long, unless there is no other."""
LIST_DEADLINE_S = 2.0
_RANDOM = random.Random()  # noqa: S311 - spreads calls, nothing secret depends on it


@dataclass(slots=True, eq=False)
class BrokerChannel(grpc.aio.Channel):
    """Calls of a client to a pool's brokers, which may change while it runs."""

    addresses: BrokerAddresses
    _shards: dict[str, str] = field(default_factory=dict, init=False)
    """Targets by the names of living brokers, as one of them said last."""
    _seeds: tuple[str, ...] = field(default=(), init=False)
    _silent_until_s: dict[str, float] = field(default_factory=dict, init=False)
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict, init=False)
    _listing: "asyncio.Task[None] | None" = field(default=None, init=False)
    _listed_s: float = field(default=-LIST_EVERY_S, init=False)
    _checks: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)

    def choose_target(self, request: object) -> str:
        """The target of a call."""
        self._refresh()
        now_s = time.monotonic()
        silent = {each for each, until_s in self._silent_until_s.items() if until_s > now_s}
        living = {name: at for name, at in self._shards.items() if at not in silent}
        key = _key(request)
        if living:
            names = sorted(living)
            return living[choose_shard(key, names) if key else _RANDOM.choice(names)]
        seeds = self._seeds or (self.addresses.text.split(",")[0].strip(),)
        return _RANDOM.choice([each for each in seeds if each not in silent] or list(seeds))

    def _refresh(self) -> None:
        is_old = time.monotonic() - self._listed_s >= LIST_EVERY_S
        if is_old and (self._listing is None or self._listing.done()):
            self._listed_s = time.monotonic()
            self._listing = asyncio.create_task(self.list_shards(), name="list-brokers")

    async def list_shards(self) -> None:
        """Ask a broker which ones live."""
        self._seeds = await self.addresses.targets()
        candidates = [*_RANDOM.sample(sorted(self._shards.values()), len(self._shards))]
        candidates += _RANDOM.sample(self._seeds, len(self._seeds))
        for target in dict.fromkeys(candidates):
            stub = environments_pb2_grpc.EnvBrokerServiceStub(self._channel(target))
            try:
                answer = await stub.ListShards(
                    environments_pb2.ListShardsRequest(), timeout=LIST_DEADLINE_S
                )
            except grpc.aio.AioRpcError as error:
                log.debug("broker %s does not answer: %s", target, error.details())
                self._avoid(target)
                continue
            self._shards = {each.name: each.target for each in answer.shards}
            return

    def _avoid(self, target: str) -> None:
        self._silent_until_s[target] = time.monotonic() + AVOID_S
        self._listed_s = -LIST_EVERY_S

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = channels.dial(target, max_backoff_ms=1_000)
        return self._channels[target]

    def _bind(self, bind: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        bound: dict[str, Any] = {}

        def call(request: object, **options: Any) -> Any:  # noqa: ANN401
            target = self.choose_target(request)
            if target not in bound:
                bound[target] = bind(self._channel(target))
            made = bound[target](request, **options)
            made.add_done_callback(lambda done: self._check_soon(target, done))
            return made

        return call

    def _check_soon(self, target: str, done: Any) -> None:  # noqa: ANN401
        if not done.cancelled():
            task = asyncio.create_task(self._check(target, done), name=f"check-{target}")
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check(self, target: str, done: Any) -> None:  # noqa: ANN401
        if await done.code() is grpc.StatusCode.UNAVAILABLE:
            self._avoid(target)

    @override
    async def __aenter__(self) -> Self:
        return self

    @override
    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @override
    async def close(self, grace: float | None = None) -> None:
        tasks = [*self._checks, *([self._listing] if self._listing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(grace)

    @override
    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel(self.choose_target(None)).get_state(try_to_connect)

    @override
    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel(self.choose_target(None)).wait_for_state_change(last_observed_state)

    @override
    async def channel_ready(self) -> None:
        await self._channel(self.choose_target(None)).channel_ready()

    @override
    def unary_unary(self, *path: Any, **kinds: Any) -> Any:
        return self._bind(lambda channel: channel.unary_unary(*path, **kinds))

    @override
    def unary_stream(self, *path: Any, **kinds: Any) -> Any:
        return self._bind(lambda channel: channel.unary_stream(*path, **kinds))

    @override
    def stream_unary(self, *path: Any, **kinds: Any) -> Any:
        return self._bind(lambda channel: channel.stream_unary(*path, **kinds))

    @override
    def stream_stream(self, *path: Any, **kinds: Any) -> Any:
        return self._bind(lambda channel: channel.stream_stream(*path, **kinds))


def _key(request: object) -> str:
    match request:
        case environments_pb2.LaunchBatchRequest():
            return batch_key(request.idempotency_key, request.group_id, request.image)
        case environments_pb2.PrepareGroupRequest():
            return batch_key("", request.group_id, request.image)
        case _:
            return ""


def dial_brokers(text: str) -> BrokerChannel:
    """A channel to the brokers of one pool.

    Args:
        text: addresses by which they are found, separated by commas.
    """
    return BrokerChannel(BrokerAddresses(text))
