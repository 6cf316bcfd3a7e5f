"""Outage budget of a rollout: time that it lost to unreachable services, with retries."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from etude.agent.trajectory import RolloutEnding, Trajectory
from etude.common.errors import UnavailableError

RETRY_S = 0.5


UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""Codes of a service that is away, or refuses more load."""


@dataclass(slots=True)
class Attempt:
    """One attempt at a call, and its last sign of progress."""

    since_s: float = field(default_factory=time.monotonic)
    """Time of the last progress, or of the start."""
    has_progress: bool = False

    def note_progress(self) -> None:
        """Record that the service did something: time up to now is not lost."""
        self.since_s = time.monotonic()
        self.has_progress = True


@dataclass(slots=True)
class OutageBudget:
    """Time that a rollout lost to services that are away or busy: not the policy's fault."""

    limit_s: float
    """Longest time without any progress."""
    lost_s: float = 0.0
    """All of the lost time."""
    stalled_s: float = 0.0
    """Time lost since the last progress."""

    @asynccontextmanager
    async def count_outage(
        self,
        what: str,
        *,
        codes: frozenset[grpc.StatusCode] = UNREACHABLE,
        has_substitute: bool = False,
    ) -> AsyncIterator[Attempt]:
        """Count the block's time if the service was unreachable; fail after too long an outage.

        Args:
            what: the service, for errors.
            codes: status codes of a service that is away.
            has_substitute: True if another service may be asked after a failure: there is neither
                a pause nor an end.

        Raises:
            UnavailableError: nothing made progress for the limit.
            AioRpcError: the service answered with an error that a retry does not cure.
        """
        attempt = Attempt()
        try:
            yield attempt
        except grpc.aio.AioRpcError as error:
            if error.code() not in codes:
                raise
            await self._add_lost_time(attempt, has_substitute=has_substitute)
            if self.stalled_s > self.limit_s and not has_substitute:
                raise UnavailableError(f"{what}: {error.details()}") from error
        except UnavailableError as error:
            await self._add_lost_time(attempt, has_substitute=has_substitute)
            if self.stalled_s > self.limit_s and not has_substitute:
                raise UnavailableError(f"{what}: {error}") from error
        else:
            self.stalled_s = 0.0

    def add_wait(self, seconds: float) -> None:
        """Count time for which the rollout had to wait for its turn."""
        self.lost_s += seconds

    async def count_wait(self, waiting: Coroutine[None, None, None]) -> None:
        """Wait for what is not the policy's; counted while it lasts, for a limit that is up.

        Raises:
            CancelledError: the wait was cancelled.
        """
        task = asyncio.create_task(waiting, name="wait")
        since_s = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait([task], timeout=RETRY_S)
                now_s = time.monotonic()
                self.add_wait(now_s - since_s)
                since_s = now_s
        except asyncio.CancelledError:
            task.cancel()
            raise
        task.result()

    async def _add_lost_time(self, attempt: Attempt, *, has_substitute: bool) -> None:
        if not has_substitute:
            await asyncio.sleep(RETRY_S)
        lost_s = time.monotonic() - attempt.since_s
        self.lost_s += lost_s
        self.stalled_s = lost_s + (0.0 if attempt.has_progress else self.stalled_s)


def was_cut_off(trajectory: Trajectory, *, is_late: bool) -> bool:
    """True if the platform, not the policy, caused the time limit, or nothing was sampled."""
    is_empty = not trajectory.costs.turns
    if trajectory.ending is not RolloutEnding.TIME_LIMIT:
        return is_empty
    return not is_late or is_empty
