"""Adaptive concurrency: token slots of a phase follow the load of its engines."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from etude.common.api.run.async_limits import Concurrency
from etude.common.rpc import channels
from etude.trainer import metrics
from etude.trainer.controller.publishing.engine_client import LOOK_S
from etude.trainer.controller.publishing.engines import Engines
from etude.trainer.routing.concurrency import (
    ConcurrencyBounds,
    EngineSample,
    join_samples,
    next_limit,
)
from etude.v1 import inference_pb2, inference_pb2_grpc

PERIOD_S = 5.0

Loads = Mapping[str, inference_pb2.GetEngineLoadResponse]
"""By target, of the engines that answered."""


@dataclass(slots=True)
class ConcurrencyControl:
    """Sets the token slots of the engines, once in a period, while a phase bounds them."""

    engines: Engines
    bounds: ConcurrencyBounds
    period_s: float = PERIOD_S
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    _preemptions: dict[str, int] = field(default_factory=dict)
    """Of each engine, when it answered last."""

    @classmethod
    def of(cls, engines: Engines, concurrency: Concurrency) -> "ConcurrencyControl":
        """Create the control of a phase."""
        return cls(engines, ConcurrencyBounds(concurrency.min, concurrency.max))

    async def run(self) -> None:
        """Adapt the slots until cancelled; without this control there is no limit."""
        self._set(self.bounds.most)
        try:
            while True:
                await asyncio.sleep(self.period_s)
                await self.adapt()
        finally:
            self._set(0)
            for channel in self._channels.values():
                await channel.close()

    async def adapt(self) -> None:
        """Look at the engines once; silent ones have no say."""
        loads = await self._read_loads()
        if loads:
            load = join_samples(self._sample(target, each) for target, each in loads.items())
            self._set(next_limit(self.engines.token_slots, load, self.bounds))

    def _set(self, limit: int) -> None:
        self.engines.token_slots = limit
        metrics.TOKEN_SLOTS.set(limit)

    def _sample(self, target: str, load: inference_pb2.GetEngineLoadResponse) -> EngineSample:
        before = self._preemptions.get(target, load.preemptions)
        self._preemptions[target] = load.preemptions
        # An engine that restarted counts from 0 again.
        new = max(0, load.preemptions - before)
        return EngineSample(load.running, load.waiting, load.kv_cache_usage, new)

    async def _read_loads(self) -> Loads:
        targets = self.engines.rotation
        answers = await asyncio.gather(*(self._read_load(target) for target in targets))
        return {t: load for t, load in zip(targets, answers, strict=True) if load is not None}

    async def _read_load(self, target: str) -> inference_pb2.GetEngineLoadResponse | None:
        if target not in self._channels:
            self._channels[target] = channels.dial(target)
        stub: inference_pb2_grpc.InferenceServiceAsyncStub = (
            inference_pb2_grpc.InferenceServiceStub(self._channels[target])
        )
        try:
            request = inference_pb2.GetEngineLoadRequest()
            return await stub.GetEngineLoad(request, timeout=LOOK_S)
        except grpc.aio.AioRpcError:
            return None
