"""An environment that goes on elsewhere when its node is lost.

The log of its calls lies with whoever holds the lease, which outlives the node: a worker that dies
takes its rollout's tokens along, and the rollout is begun again anyway. A new lease starts from
the first files. What may have changed something is run again, turn by turn, and must have the
results that it had; what only reads is answered from the log.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from opentelemetry import trace
from typing_extensions import override

from etude.agent import replay
from etude.agent.replay import CallLog
from etude.agent.tools.base import ToolOutcome
from etude.agent.turns import Environment, ToolCall
from etude.common.errors import UnavailableError
from etude.trainer.rollouts.engine_client import EnvironmentLostError, LeasedEnvironment, Outage
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.snapshot_client import LeaseStates
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Environments that may be lost one after the other before the rollout is."""
PLACEMENT_S = 20.0
"""How long the next environment may wait for a slot. A rollout that is begun again waits in its
turn, for minutes."""

_T = TypeVar("_T")


class Replacing(Protocol):
    """Where new environments for a rollout come from."""

    def request(self, number: int) -> environments_pb2.LaunchBatchRequest:
        """The order for the rollout's environment of this number, from 1 on."""
        ...

    def environment(self, lease: environments_pb2.Lease) -> LeasedEnvironment:
        """What runs calls on a lease."""
        ...

    def states(self, lease: environments_pb2.Lease) -> LeaseStates:
        """What saves it."""
        ...


@dataclass(slots=True)
class Tally:
    """What lost environments cost."""

    lost: int = 0
    recovered: int = 0
    replayed: int = 0
    """Calls that were run again for that."""


@dataclass(slots=True)
class RecoveringEnvironment(Environment):
    """One rollout's environment, whichever lease it lives on.

    Its methods raise EnvironmentLostError when it was lost too often or has been called too much to
    be made again, DivergedError when it could not be made what it was, and UnavailableError when
    its node stayed away or no other had a slot.
    """

    leases: Leases
    replacing: Replacing
    log: CallLog
    outage: Outage
    present: LeasedEnvironment
    tally: Tally = field(default_factory=Tally)
    _number: int = 0
    _lost: EnvironmentLostError | None = None
    """Why it has to be made again before anything else."""
    _unanswered: Seq[ToolCall] = ()
    """A turn that nobody waits for any more, which its node brings to an end all the same."""

    @property
    def lease(self) -> environments_pb2.Lease:
        """The lease that it lives on now."""
        return self.present.lease

    @override
    async def run(self, calls: Seq[ToolCall]) -> Seq[ToolOutcome]:
        known = self.log.answered(calls)
        fresh = [call for call in calls if call.call_id not in known]
        if fresh:
            self._unanswered = fresh
            outcomes = await self._surviving(lambda: self.present.run(fresh))
            self._unanswered = ()
            self.log.add(fresh, outcomes)
            known |= {call.call_id: each for call, each in zip(fresh, outcomes, strict=True)}
        return [known[call.call_id] for call in calls]

    async def diff(self) -> bytes:
        """The changes of the workspace, once the policy has ended."""

        async def work() -> bytes:
            if self._unanswered:
                await self.present.run(self._unanswered)
            return await self.present.diff()

        return await self._surviving(work)

    async def _surviving(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """The result of work on the environment, which is made again each time that it is lost.

        Raises:
            EnvironmentLostError: it was lost too often.
        """
        for _ in range(1 + MAX_TRIES):
            began_s, lost_s = time.monotonic(), self.outage.lost_s
            try:
                if self._lost is not None:
                    await self._recover(self._lost)
                    self._lost = None
                    self.outage.lost_s = lost_s + time.monotonic() - began_s
                return await work()
            except EnvironmentLostError as error:
                self._lost = error
                self.tally.lost += 1
                log.warning("%s", error)
            finally:
                if self._lost is not None:
                    # What is done twice is no time of the policy's, however it ends.
                    self.outage.lost_s = lost_s + time.monotonic() - began_s
        raise EnvironmentLostError(f"lost {1 + MAX_TRIES} times, the last: {self._lost}")

    async def _recover(self, cause: EnvironmentLostError) -> None:
        """Another lease in the state that the lost one was in.

        Raises:
            UnavailableError: there is none, or too much would have to be run again.
        """
        if not self.log.is_whole:
            raise UnavailableError(f"{cause}; it was called too much to be made again") from cause
        until_s = time.monotonic() + PLACEMENT_S
        self.leases.release([self.lease.lease_id])
        await self._start(cause, until_s)
        self._tell(cause, await self._replayed())

    async def _start(self, cause: EnvironmentLostError, until_s: float) -> None:
        """Lease an environment with the first files.

        Raises:
            UnavailableError: there is none.
        """
        self._number += 1
        request = self.replacing.request(self._number)
        request.queue_timeout_seconds = max(1, math.ceil(until_s - time.monotonic()))
        lease, failure = None, "the broker gave no answer"
        async for launch in self.leases.launch(request):
            lease, failure = launch.lease, launch.failure
            if lease is not None:
                self.present = self.replacing.environment(lease)
        if lease is None:
            raise UnavailableError(f"{cause}; no other could be had: {failure}") from cause

    async def _replayed(self) -> int:
        """Run again what changed something; answers how many calls that were."""
        turns = self.log.repeated()
        for turn in turns:
            outcomes = await self.present.run([logged.call for logged in turn])
            replay.check(turn, outcomes)
        num_calls = sum(map(len, turns))
        self.tally.recovered += 1
        self.tally.replayed += num_calls
        return num_calls

    def _tell(self, cause: EnvironmentLostError, num_calls: int) -> None:
        log.info("lease %s goes on: %d calls run again", self.lease.lease_id, num_calls)
        about: dict[str, str | int] = {
            "etude.fault": str(cause)[:200],
            "etude.lease.id": self.lease.lease_id,
            "etude.replayed_calls": num_calls,
        }
        trace.get_current_span().add_event("environment.recovered", about)
