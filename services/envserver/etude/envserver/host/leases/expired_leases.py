"""Expired leases that are paused on the disk, for a client to resume."""

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field

from etude.common.errors import EtudeError
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.leases import lease_fields
from etude.envserver.host.snapshots.environment_state import EnvironmentStates
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

KEEP_S = 900.0
"""How long an expired lease is kept: brokers remember it as long."""
SLACK_S = 2.0
"""Clock difference: a broker may end a lease before it has expired by this host's clock."""


@dataclass(slots=True)
class ExpiredLeases:
    """Paused leases. They take no slot: resuming one needs a free one."""

    states: EnvironmentStates
    _environments: dict[str, LeasedEnvironment] = field(default_factory=dict)
    _resumed_s: dict[str, float] = field(default_factory=dict)
    """When leases were resumed, for SLACK_S."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._environments

    def __len__(self) -> int:
        return len(self._environments)

    def get(self, lease_id: str) -> LeasedEnvironment | None:
        return self._environments.get(lease_id)

    def resume(self, lease_id: str) -> LeasedEnvironment:
        """Remove a lease that is resumed."""
        self._resumed_s[lease_id] = time.monotonic()
        return self._environments.pop(lease_id)

    def was_just_resumed(self, lease_id: str) -> bool:
        """True if an order to end a lease may refer to the end before it was resumed.

        A valid order is repeated with each heartbeat.
        """
        return time.monotonic() - self._resumed_s.get(lease_id, -math.inf) < SLACK_S

    def add(self, environment: LeasedEnvironment, *, for_s: float) -> None:
        """Add one that a predecessor kept."""
        environment.deadline_s = time.monotonic() + for_s
        self._environments[environment.lease_id] = environment

    def keep(self, environment: LeasedEnvironment) -> None:
        """Pause an expired environment, after its running turn."""
        self.add(environment, for_s=KEEP_S)
        task = asyncio.create_task(self._pause(environment), name=f"keep {environment.lease_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait until all kept environments are paused."""
        await asyncio.gather(*self._tasks)

    async def expire(self, *, now_s: float) -> None:
        """End environments whose time is over, by the monotonic clock."""
        over = [each for each in self._environments.values() if each.deadline_s <= now_s]
        for environment in over:
            del self._environments[environment.lease_id]
        await asyncio.gather(*(environment.close() for environment in over))
        self._resumed_s = {each: at for each, at in self._resumed_s.items() if at > now_s - SLACK_S}

    def environments(self) -> list[LeasedEnvironment]:
        return list(self._environments.values())

    def runs(self) -> set[str]:
        return {each.record.held.run_id for each in self._environments.values()}

    async def _pause(self, environment: LeasedEnvironment) -> None:
        until_unix_ms = round(1000 * (time.time() + KEEP_S))
        try:
            await self.states.pause(environment, until_unix_ms=until_unix_ms)
        except EtudeError as error:
            log.warning("lease %s cannot be kept: %s", environment.lease_id, error)
            self._environments.pop(environment.lease_id, None)
            await environment.close()


def pauses_on_expiry(environment: LeasedEnvironment) -> bool:
    """True if it is paused, not ended, when its lease expires."""
    return environment.record.on_expiry == environments_pb2.ON_EXPIRY_PAUSE


def has_expired(environment: LeasedEnvironment) -> bool:
    """True if its time is over by this host's clock."""
    return lease_fields.seconds_left(environment.record.held.lease) < SLACK_S
