"""Environment leases of a rollout worker: launched in batches, renewed, released together."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from etude.common import telemetry
from etude.common.errors import UnavailableError
from etude.common.rpc import channels
from etude.common.rpc.retry_after import retry_after_s
from etude.v1 import environments_pb2, environments_pb2_grpc

log = logging.getLogger(__name__)

RENEW_EVERY_S = 15.0
"""Three attempts fit into the shortest lease time that a pool may have."""

RENEW_AT_ONCE = 1_000
"""Leases in one call: with more it could miss its deadline."""
TRIES = 3
"""The broker of a lease may have died: another takes over within seconds."""
RETRY_S = 1.0


class LaunchResult(NamedTuple):
    """One environment of a batch: a lease, or the failure."""

    place: int
    """Index in the batch."""
    lease: environments_pb2.Lease | None
    failure: str


@dataclass(slots=True)
class Leases:
    """The leases of this process at one broker; a background task must renew and release them."""

    broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    outage_s: float
    """Longest wait for a broker that does not answer."""
    _held: set[str] = field(default_factory=set)
    _gone: dict[str, asyncio.Event] = field(default_factory=dict)
    """By lease: set once it is gone."""
    _ended: list[str] = field(default_factory=list)
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _is_answered: bool = False

    @property
    def is_answered(self) -> bool:
        """True if the broker answered when leases were last renewed."""
        return self._is_answered

    async def launch(
        self, request: environments_pb2.LaunchBatchRequest
    ) -> AsyncIterator[LaunchResult]:
        """Launch a batch; yield each environment as it becomes ready.

        A broken stream is reopened: the same key gives the same leases. A full broker is retried
        at the time it names, for as long as the request may wait in its queue.

        Raises:
            UnavailableError: the broker stayed away, or stayed full.
        """
        seen: set[int] = set()
        waited_s = refused_s = 0.0
        while waited_s <= self.outage_s:
            try:
                async for answer in self._answers(request):
                    if answer.index not in seen:
                        seen.add(answer.index)
                        yield self._accept(answer)
            except grpc.aio.AioRpcError as error:
                later_s = retry_after_s(error)
                if later_s is not None and refused_s < request.queue_timeout_seconds:
                    log.info("%s: retrying in %.1f s", error.details(), later_s)
                    refused_s += later_s
                    await asyncio.sleep(later_s)
                    continue
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise UnavailableError(f"broker: {error.details()}") from error
            if len(seen) >= request.count:
                return
            await asyncio.sleep(RETRY_S)
            waited_s += RETRY_S
            request.is_repeated = True
        raise UnavailableError(f"broker: no answer within {self.outage_s:.0f} s")

    def _answers(
        self, request: environments_pb2.LaunchBatchRequest
    ) -> AsyncIterable[environments_pb2.LaunchBatchResponse]:
        timeout_s = request.queue_timeout_seconds + channels.CONTROL_DEADLINE_S
        return self.broker.LaunchBatch(
            request, timeout=timeout_s, metadata=telemetry.trace_metadata()
        )

    def _accept(self, answer: environments_pb2.LaunchBatchResponse) -> LaunchResult:
        if answer.WhichOneof("outcome") == "lease":
            self._held.add(answer.lease.lease_id)
            return LaunchResult(answer.index, answer.lease, "")
        failure = answer.failure
        return LaunchResult(answer.index, None, f"{failure.reason}: {failure.message}")

    async def take_over(self, lease_id: str) -> bool:
        """Hold a lease that another worker got; False if it is gone."""
        self._held.add(lease_id)
        return not await self.is_gone(lease_id)

    async def announce(self, request: environments_pb2.PrepareGroupRequest) -> None:
        """Tell the broker that a group starts soon; a broker that does not answer places it later.

        It is a hint: the group's launch says everything again.
        """
        try:
            await self.broker.PrepareGroup(request, timeout=channels.CONTROL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("group %s is not announced: %s", request.group_id, error.details())

    def release(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self._forget(lease_id)
        self._ended += lease_ids
        self._work.set()

    def leave(self, lease_ids: Sequence[str]) -> None:
        """Let leases expire at their time: a successor of their rollouts takes them over."""
        for lease_id in lease_ids:
            self._forget(lease_id)

    async def is_gone(self, lease_id: str) -> bool:
        """Ask the broker whether a lease is gone; False while it does not answer.

        A lease whose host missed three heartbeats is gone, and does not come back.
        """
        if lease_id in self._held:
            await self._renew([lease_id])
        return lease_id not in self._held

    async def wait_until_gone(self, lease_id: str) -> None:
        """Wait until the broker says that a lease is gone."""
        if lease_id in self._held:
            await self._gone.setdefault(lease_id, asyncio.Event()).wait()

    async def keep_alive(self) -> None:
        """Renew and release until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_renewing(), name="renew-leases")
            tasks.create_task(self._keep_releasing(), name="release-leases")

    async def close(self) -> None:
        """Release leases that no rollout has left, after the background task has ended."""
        self.release(sorted(self._held))
        await self._release_ended()

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            held = sorted(self._held)
            for start in range(0, len(held), RENEW_AT_ONCE):
                await self._renew(held[start : start + RENEW_AT_ONCE])

    async def _renew(self, lease_ids: Sequence[str]) -> None:
        # The pool's spec sets the lease time, as at the launch.
        request = environments_pb2.RenewLeasesRequest(lease_ids=lease_ids)
        for left in reversed(range(TRIES)):
            try:
                answer = await self.broker.RenewLeases(request, timeout=channels.CONTROL_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                self._is_answered = False
                if not left or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    log.warning("leases not renewed: %s", error.details())
                    return
                await asyncio.sleep(RETRY_S)
            else:
                self._is_answered = True
                for lease_id in answer.missing_lease_ids:
                    self._forget(lease_id)
                return

    def _forget(self, lease_id: str) -> None:
        self._held.discard(lease_id)
        if (waiting := self._gone.pop(lease_id, None)) is not None:
            waiting.set()

    async def _keep_releasing(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._release_ended()

    async def _release_ended(self) -> None:
        """Release ended leases; they stay listed until the call is over: close() may repeat it."""
        ended = list(self._ended)
        if not ended:
            return
        request = environments_pb2.ReleaseLeasesRequest(lease_ids=ended)
        for left in reversed(range(TRIES)):
            try:
                await self.broker.ReleaseLeases(request, timeout=channels.CONTROL_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                if not left or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    # They are not renewed any more, so they expire.
                    log.warning("%d leases not released: %s", len(ended), error.details())
                    break
                await asyncio.sleep(RETRY_S)
            else:
                break
        del self._ended[: len(ended)]


@dataclass(slots=True)
class RolloutSlots:
    """Concurrency limit of rollouts, first come first served."""

    size: int = 0
    """Limit of the newest request; slots beyond it drain as rollouts end."""
    _taken: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def acquire(self, wanted: int) -> int:
        """Wait for at least one slot; acquire at most the wanted number."""
        async with self._turn:
            while self._taken >= self.size:
                self._freed.clear()
                await self._freed.wait()
            granted = min(wanted, self.size - self._taken)
            self._taken += granted
            return granted

    def resize(self, size: int) -> None:
        """Set the limit; it may change with the phase."""
        self.size = size
        self._freed.set()

    def release(self) -> None:
        self._taken -= 1
        self._freed.set()


@dataclass(slots=True)
class GroupSlots:
    """Slots that one group has acquired."""

    slots: RolloutSlots
    _taken: int = 0

    async def acquire(self, wanted: int) -> int:
        """Wait for at least one slot; acquire at most the wanted number."""
        granted = await self.slots.acquire(wanted)
        self._taken += granted
        return granted

    def release(self) -> None:
        self._taken -= 1
        self.slots.release()

    def close(self) -> None:
        """Release those of rollouts that were cancelled before they had an environment."""
        while self._taken:
            self.release()
