"""Failover of environments: a lost one is replaced by a new lease, and its calls are replayed.

The worker keeps the call log, which thus outlives the sandbox host, and records it for a worker
that replaces this one. A new lease starts from the initial
files, and is set up as the lost one was. Calls that may have side effects are replayed turn by
turn and must return their earlier results; calls that only read are answered from the log.
"""

import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from opentelemetry import trace
from typing_extensions import override

from etude.agent import replay
from etude.agent.replay import CallLog
from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ToolOutcome
from etude.agent.turns import RolloutEnvironment
from etude.common.errors import UnavailableError
from etude.trainer.rollouts.leases import Leases
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.sandbox_client import EnvironmentLostError, SandboxClient
from etude.trainer.rollouts.snapshot_client import SnapshotClient
from etude.trainer.rollouts.trajectories.recorded_rollout import RecordedRollout
from etude.trainer.rollouts.trajectories.recorder import RolloutRecorder
from etude.v1 import environments_pb2

log = logging.getLogger(__name__)

MAX_TRIES = 3
"""Replacements before the rollout counts as lost."""
PLACEMENT_S = 20.0
"""Longest wait of a replacement for a slot. A rollout that restarts queues for minutes instead."""

_T = TypeVar("_T")


class ReplacementSource(Protocol):
    """Source of replacement environments for one rollout."""

    def request(self, number: int) -> environments_pb2.LaunchBatchRequest:
        """Build the launch request of a replacement, numbered from 1."""
        ...

    def environment(self, lease: environments_pb2.Lease) -> SandboxClient:
        """Client for tool calls on a lease."""
        ...

    def states(self, lease: environments_pb2.Lease) -> SnapshotClient:
        """Client for snapshots of a lease."""
        ...

    async def set_up(self, lease: environments_pb2.Lease) -> None:
        """Run the set-up of the task, if it has one, in a lease that was not used.

        Raises:
            SetupFailedError: a command failed.
            AioRpcError: the host refuses, or went away.
        """
        ...


@dataclass(slots=True)
class FailoverCounts:
    """Counts of lost environments, recoveries and replayed calls."""

    lost: int = 0
    recovered: int = 0
    replayed: int = 0
    """Calls that were replayed in replacements."""


@dataclass(slots=True)
class FailoverEnvironment(RolloutEnvironment):
    """One rollout's environment, which moves to another lease after a loss.

    Its methods raise EnvironmentLostError after too many losses, DivergedError when a replay gave
    other results, and UnavailableError when the host stayed away, the call log is incomplete, or
    no replacement could be leased.
    """

    leases: Leases
    source: ReplacementSource
    log: CallLog
    outage: OutageBudget
    current: SandboxClient
    recorder: RolloutRecorder | None = None
    """Of the rollout; None if it is not recorded."""
    tally: FailoverCounts = field(default_factory=FailoverCounts)
    is_sound: bool = True
    """True if the lease did all that it was asked to: another attempt may go on in it."""
    _number: int = 0
    _lost: EnvironmentLostError | None = None
    """The loss that must be recovered from before the next call."""
    _unanswered: Seq[ToolCall] = ()
    """A turn whose caller has left; the host completes it all the same."""

    @property
    def lease(self) -> environments_pb2.Lease:
        return self.current.lease

    @override
    async def run(self, calls: Seq[ToolCall]) -> Seq[ToolOutcome]:
        known = self.log.known_outcomes(calls)
        fresh = [call for call in calls if call.call_id not in known]
        if fresh:
            self._unanswered = fresh
            started_s = time.monotonic()
            outcomes = await self._with_failover(lambda: self.current.run(fresh))
            self._unanswered = ()
            self.log.add(fresh, outcomes)
            if self.recorder is not None:
                self.recorder.add_results(fresh, outcomes, time.monotonic() - started_s)
            known |= {call.call_id: each for call, each in zip(fresh, outcomes, strict=True)}
        return [known[call.call_id] for call in calls]

    async def diff(self) -> bytes:
        """Diff of the workspace, after the end of the rollout."""

        async def work() -> bytes:
            if self._unanswered:
                await self.current.run(self._unanswered)
            return await self.current.diff()

        return await self._with_failover(work)

    async def diff_of_step(self, number: int) -> bytes:
        """Diff of the workspace at the end of a step of the task, as it was recorded or is now."""
        if self.recorder is None:
            return await self.diff()
        changes = self.recorder.rollout.changes
        if number >= len(changes):
            self.recorder.add_change(await self.diff())
        return changes[number]

    async def last_diff(self) -> bytes:
        """Diff of the workspace at the end of a rollout of one piece, as it was recorded or is now.

        The host may end the environment once it is recorded.
        """
        if self.recorder is None:
            return await self.diff()
        if not self.recorder.rollout.changes:
            self.recorder.add_last_change(diff := await self.diff())
            return diff
        return self.recorder.rollout.changes[0]

    async def snapshot_end(self) -> str:
        """Snapshot the end state, processes included; return the snapshot's id."""
        states = self.source.states(self.lease)
        answer = await states.snapshot(f"end-{uuid.uuid4().hex}", with_memory=True)
        return answer.snapshot_id

    def own_s(self, started_s: float) -> float:
        """Time that counts toward the limit of the rollout, that of earlier attempts included."""
        if self.recorder is not None:
            return self.recorder.active_s
        return time.monotonic() - started_s - self.outage.lost_s

    def load_calls(self, rollout: RecordedRollout) -> None:
        """Log the calls of a rollout that goes on, in its environment or in another."""
        for calls, outcomes in rollout.answered_turns():
            self.log.add(calls, outcomes)
        if rollout.lease is not None:
            self.current.known = {
                call.call_id for calls, _ in rollout.answered_turns() for call in calls
            }

    async def rebuild(self) -> int:
        """Replay the logged calls in an environment that was set up; return their number.

        Raises:
            DivergedError: one had another result.
        """
        return await self._with_failover(self._replay_calls)

    async def _with_failover(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run work on the environment, with failover after each loss.

        Raises:
            EnvironmentLostError: it was lost too often.
        """
        self.is_sound = False
        for _ in range(1 + MAX_TRIES):
            began_s, lost_s = time.monotonic(), self.outage.lost_s
            try:
                if self._lost is not None:
                    await self._fail_over(self._lost)
                    self._lost = None
                    self.outage.lost_s = lost_s + time.monotonic() - began_s
                answer = await work()
            except EnvironmentLostError as error:
                self._lost = error
                self.tally.lost += 1
                log.warning("%s", error)
            else:
                self.is_sound = True
                return answer
            finally:
                if self._lost is not None:
                    # Replayed work does not count as the policy's time, even if the replay fails.
                    self.outage.lost_s = lost_s + time.monotonic() - began_s
        raise EnvironmentLostError(f"lost {1 + MAX_TRIES} times, the last: {self._lost}")

    async def _fail_over(self, cause: EnvironmentLostError) -> None:
        """Replace the lost lease by one in the same state.

        Raises:
            UnavailableError: no lease was available, or the call log is incomplete.
        """
        if not self.log.is_complete:
            raise UnavailableError(f"{cause}; its call log is too long to be replayed") from cause
        until_s = time.monotonic() + PLACEMENT_S
        self.leases.release([self.lease.lease_id])
        await self._lease_replacement(cause, until_s)
        await self.source.set_up(self.lease)
        self._record_event(cause, await self._replay_calls())
        self.tally.recovered += 1

    async def _lease_replacement(self, cause: EnvironmentLostError, until_s: float) -> None:
        """Lease an environment with the initial files.

        Raises:
            UnavailableError: there is none.
        """
        self._number += 1
        request = self.source.request(self._number)
        request.queue_timeout_seconds = max(1, math.ceil(until_s - time.monotonic()))
        lease, failure = None, "the broker gave no answer"
        async for launch in self.leases.launch(request):
            lease, failure = launch.lease, launch.failure
            if lease is not None:
                self.current = self.source.environment(lease)
                if self.recorder is not None:
                    self.recorder.move(lease)
        if lease is None:
            raise UnavailableError(f"{cause}; no replacement was available: {failure}") from cause

    async def _replay_calls(self) -> int:
        """Replay the calls that may have side effects; return their number."""
        turns = self.log.calls_to_replay()
        for turn in turns:
            outcomes = await self.current.run([logged.call for logged in turn])
            replay.check_replay(turn, outcomes)
        num_calls = sum(map(len, turns))
        self.tally.replayed += num_calls
        return num_calls

    def _record_event(self, cause: EnvironmentLostError, num_calls: int) -> None:
        log.info("lease %s replaces a lost one: %d calls replayed", self.lease.lease_id, num_calls)
        about: dict[str, str | int] = {
            "etude.fault": str(cause)[:200],
            "etude.lease.id": self.lease.lease_id,
            "etude.replayed_calls": num_calls,
        }
        trace.get_current_span().add_event("environment.recovered", about)
