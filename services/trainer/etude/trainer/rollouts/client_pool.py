"""Client pool of a rollout worker: one long-lived gRPC channel per target."""

import asyncio
from dataclasses import dataclass, field

import grpc

from etude.common.rpc import channels
from etude.common.rpc.broker_channel import dial_brokers
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.protocol import WorkerConfig
from etude.v1 import (
    environment_state_pb2_grpc,
    environments_pb2_grpc,
    inference_pb2_grpc,
    rewards_pb2_grpc,
)


@dataclass(slots=True)
class ClientPool:
    """Channels, stubs and leases, created on first use."""

    config: WorkerConfig
    _channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    _leases: dict[str, Leases] = field(default_factory=dict)
    _renewals: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def engine_stub(self, target: str) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        return inference_pb2_grpc.InferenceServiceStub(self._channel(target))

    def sandbox_stub(self, target: str) -> "environments_pb2_grpc.EnvNodeServiceAsyncStub":
        return environments_pb2_grpc.EnvNodeServiceStub(self._channel(target))

    def snapshot_stub(self, target: str) -> "environment_state_pb2_grpc.EnvStateServiceAsyncStub":
        return environment_state_pb2_grpc.EnvStateServiceStub(self._channel(target))

    def reward_stub(self) -> "rewards_pb2_grpc.RewardServiceAsyncStub":
        return rewards_pb2_grpc.RewardServiceStub(self._channel(self.config.rewards_target))

    def leases(self, environment: str) -> Leases:
        """Leases in one environment's pool, renewed in the background from now on.

        An error of the background task is raised here: without it every lease would soon expire.
        """
        if environment not in self._leases:
            brokers = self.config.brokers[environment]
            channel = self._channels.setdefault(brokers, dial_brokers(brokers))
            broker = environments_pb2_grpc.EnvBrokerServiceStub(channel)
            found = self._leases[environment] = Leases(broker, self.config.outage_s)
            renewal = asyncio.create_task(found.keep_alive(), name=f"leases-{environment}")
            self._renewals[environment] = renewal
        elif self._renewals[environment].done():
            self._renewals[environment].result()
        return self._leases[environment]

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = channels.dial(target)
        return self._channels[target]

    async def close(self) -> None:
        """Release all leases and close all channels."""
        renewals = self._renewals.values()
        for task in renewals:
            task.cancel()
        await asyncio.gather(*renewals, return_exceptions=True)
        for leases in self._leases.values():
            await leases.close()
        for channel in self._channels.values():
            await channel.close()
