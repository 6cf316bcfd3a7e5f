"""Outage budget of a rollout: time that it may lose to unreachable services, with retries."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from etude.common.errors import UnavailableError

RETRY_S = 0.5


UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""Codes of a service that is away, or refuses more load."""


@dataclass(slots=True)
class OutageBudget:
    """Time that a rollout lost to unreachable services, which is not the policy's fault."""

    limit_s: float
    lost_s: float = 0.0

    @asynccontextmanager
    async def count_outage(self, what: str) -> AsyncIterator[None]:
        """Count the block's time if the service was unreachable; fail once too much time was lost.

        Raises:
            UnavailableError: the service stayed away.
            AioRpcError: it answered with an error that a retry does not cure.
        """
        started = time.monotonic()
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() not in UNREACHABLE:
                raise
            await self._add_lost_time(started)
            if self.lost_s > self.limit_s:
                raise UnavailableError(f"{what}: {error.details()}") from error
        except UnavailableError as error:
            await self._add_lost_time(started)
            if self.lost_s > self.limit_s:
                raise UnavailableError(f"{what}: {error}") from error

    async def _add_lost_time(self, started_s: float) -> None:
        await asyncio.sleep(RETRY_S)
        self.lost_s += time.monotonic() - started_s
