"""Preemption of a host's environments on the orders of its broker."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from etude.common.errors import EtudeError
from etude.envserver import metrics
from etude.envserver.host.environment import LeasedEnvironment
from etude.envserver.host.snapshots.environment_state import EnvironmentStates

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HostPreemptions:
    """Pauses environments between two turns, and resumes them."""

    states: EnvironmentStates
    held: Mapping[str, LeasedEnvironment]
    """All of the host."""
    has_room: Callable[[], bool]
    """True while a slot is free."""
    _resuming: set[str] = field(default_factory=set)

    @property
    def num_paused(self) -> int:
        """Environments that take no slot."""
        return sum(
            each.record.held.preempted and lease_id not in self._resuming
            for lease_id, each in self.held.items()
        )

    async def preempt(self, lease_ids: Sequence[str], count: int) -> list[str]:
        """Pause some of these environments, the first that can be; returns those that are."""
        candidates = [self.held[each] for each in lease_ids if each in self.held]
        paused = list[str]()
        while candidates and len(paused) < count:
            chosen, candidates = (
                candidates[: count - len(paused)],
                candidates[count - len(paused) :],
            )
            done = await asyncio.gather(*map(self._preempt, chosen))
            paused += [each.lease_id for each, is_done in zip(chosen, done, strict=True) if is_done]
        return paused

    async def resume(self, lease_ids: Sequence[str]) -> list[str]:
        """Let preempted environments go on while there are slots; returns those that do."""
        chosen = list[LeasedEnvironment]()
        for lease_id in lease_ids:
            environment = self.held.get(lease_id)
            if environment is None or lease_id in self._resuming or not self.has_room():
                continue
            if environment.record.held.preempted:
                self._resuming.add(lease_id)
            chosen.append(environment)
        done = await asyncio.gather(*map(self._resume, chosen))
        return [each.lease_id for each, is_done in zip(chosen, done, strict=True) if is_done]

    async def _preempt(self, environment: LeasedEnvironment) -> bool:
        if environment.turn.locked() or environment.record.held.preempted:
            return False
        try:
            is_done = await self.states.preempt(environment)
        except EtudeError as error:
            log.warning("lease %s cannot be preempted: %s", environment.lease_id, error)
            return False
        if is_done:
            metrics.preemptions.labels("paused").inc()
        return is_done

    async def _resume(self, environment: LeasedEnvironment) -> bool:
        was_preempted = environment.record.held.preempted
        try:
            await self.states.resume_preempted(environment)
        except EtudeError as error:
            log.warning("preempted lease %s is not resumed: %s", environment.lease_id, error)
            return False
        finally:
            self._resuming.discard(environment.lease_id)
        if was_preempted:
            metrics.preemptions.labels("resumed").inc()
        return True
