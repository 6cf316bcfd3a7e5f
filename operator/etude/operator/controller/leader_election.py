"""Leader election: one replica acts, as long as it renews a Lease.

A lease has expired once this process has seen it unchanged for its duration on its own monotonic
clock; times in the record are for people. A process that was stopped and continued finds its
write gate closed before it can write anything.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from etude.operator import metrics
from etude.operator.clock import Clock
from etude.operator.kube.interface import ClusterError, ConflictError
from etude.operator.kube.leases import DURATION_S, LeaderLease, LeaseStore

log = logging.getLogger(__name__)

RENEW_DEADLINE_S = 7.0
"""The write gate closes this long after a renewal: with the longest request, below the duration."""
RETRY_S = 2.0
"""From the start of one attempt to the next."""
ATTEMPT_LIMIT_S = 2.5
"""An attempt that hangs leaves time for another before the gate closes."""


@dataclass(slots=True)
class LeaderElector:
    """A candidate for leadership."""

    leases: LeaseStore
    clock: Clock
    identity: str
    _renewed_s: float = float("-inf")
    _seen: LeaderLease | None = None
    _seen_s: float = 0.0
    _held: LeaderLease | None = field(default=None)

    def may_write(self) -> bool:
        """Return true while this process certainly leads: the write gate."""
        return self.clock.monotonic_s() < self._renewed_s + RENEW_DEADLINE_S

    async def lead(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        while True:
            await self._acquire()
            log.info("%s became the leader", self.identity)
            metrics.LEADER.set(1)
            try:
                await self._work_while_leading(work)
            finally:
                metrics.LEADER.set(0)
            log.warning("%s lost leadership", self.identity)

    async def campaign(self) -> bool:
        """Take or renew the lease if that is due; returns true if this process leads now."""
        began = self.clock.monotonic_s()
        try:
            async with asyncio.timeout(ATTEMPT_LIMIT_S):
                taken = await self._try_acquire(began)
        except ConflictError:
            return False
        except (ClusterError, TimeoutError) as error:
            log.warning("leader lease could not be renewed: %r", error)
            return self.may_write()
        if taken is None:
            return False
        # Counted from before the request: other candidates see the record later than that.
        self._renewed_s = began
        self._held = taken
        return True

    async def _try_acquire(self, now_s: float) -> LeaderLease | None:
        record = await self.leases.read()
        if not self._may_acquire(record, now_s):
            return None
        return await self.leases.write(self._claim(record))

    async def _acquire(self) -> None:
        while True:
            if await self.campaign():
                return
            await asyncio.sleep(RETRY_S)

    async def release(self) -> None:
        """Give the lease up, so that a successor takes over immediately."""
        self._renewed_s = float("-inf")
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(ClusterError):  # it expires anyway
                await self.leases.write(held._replace(holder=""))

    async def _work_while_leading(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work(), name="leader-work")
            pause_s = RETRY_S
            while self.may_write():
                await asyncio.sleep(pause_s)
                began = self.clock.monotonic_s()
                await self.campaign()
                # An attempt that hung has used up its pause.
                pause_s = max(0.0, began + RETRY_S - self.clock.monotonic_s())
            working.cancel()

    def _may_acquire(self, record: LeaderLease | None, now_s: float) -> bool:
        if record is None or record.holder in {"", self.identity}:
            return True
        if self._seen is None or self._seen.version != record.version:
            # Not from before the request: it may have been written while that was under way.
            self._seen, self._seen_s = record, self.clock.monotonic_s()
        return now_s - self._seen_s > record.duration_s

    def _claim(self, record: LeaderLease | None) -> LeaderLease:
        if record is None:
            return LeaderLease(self.identity)
        changes = record.holder != self.identity
        return LeaderLease(
            self.identity, DURATION_S, record.transitions + int(changes), record.version
        )
