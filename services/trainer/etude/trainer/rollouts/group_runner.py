"""Group runner: leases environments for sibling rollouts, runs them, retries platform faults."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry import trace

from etude.agent.chat import ChatFormat
from etude.agent.replay import CallLog
from etude.agent.rollout import run_rollout
from etude.agent.rollout_message import to_rollout_message
from etude.agent.token_policy import RolloutTask
from etude.agent.toolsets import Toolset
from etude.agent.trajectory import RolloutEnding, Trajectory
from etude.common.errors import EtudeError
from etude.trainer.rollouts.client_pool import ClientPool
from etude.trainer.rollouts.completion_counts import CompletionCounts
from etude.trainer.rollouts.endpoint_policy import (
    EndpointClient,
    EndpointPolicy,
    run_endpoint_rollout,
)
from etude.trainer.rollouts.engine_client import EngineSampler
from etude.trainer.rollouts.environments import GroupEnvironments, RolloutEnvironments
from etude.trainer.rollouts.failover import FailoverCounts, FailoverEnvironment
from etude.trainer.rollouts.group_start import GroupSnapshot, GroupStart
from etude.trainer.rollouts.leases import GroupSlots, LaunchResult
from etude.trainer.rollouts.outage import OutageBudget, was_cut_off
from etude.trainer.rollouts.protocol import GroupRequest, WorkerConfig
from etude.trainer.rollouts.sandbox_client import ChangeTooLargeError
from etude.trainer.rollouts.snapshot_client import fork_request
from etude.trainer.rollouts.task_setup import SetupFailedError
from etude.trainer.rollouts.task_steps import StepContent, StepProgress, check_changes
from etude.trainer.rollouts.trajectories.faults import FAULTS, lost_rollout
from etude.trainer.rollouts.trajectories.history import GroupHistory
from etude.trainer.rollouts.trajectories.recorder import RecordedSampler
from etude.trainer.rollouts.trajectories.resume_counts import Resume
from etude.trainer.routing.router import Router
from etude.trainer.seeding import derive_seed
from etude.v1 import environments_pb2, rollout_pb2

log = logging.getLogger(__name__)
_TRACER = trace.get_tracer("etude.trainer")

FORK_WAIT_S = 60
"""Longest wait of forks for slots of the host that has their snapshot; then others are set up."""


@dataclass(slots=True, kw_only=True)
class GroupRunner:
    """Runs the siblings of one group request."""

    order: GroupRequest
    config: WorkerConfig
    chat: ChatFormat | EndpointClient
    """The conversation's format on engines, or the endpoint that has its own."""
    tools: Toolset
    slots: GroupSlots
    clients: ClientPool
    environments: GroupEnvironments
    router: Router
    start: GroupStart
    """What the rollouts start from."""
    history: GroupHistory
    """What earlier workers recorded."""
    upcoming: asyncio.Semaphore
    """Bounds the groups of a worker that are prepared and wait for slots."""
    saves_end_state: bool = False
    """True if the end state is snapshotted, to be graded in a fork."""
    steps: Sequence[StepContent] = ()
    """Of the task, if it has several."""
    retried: int = 0
    tally: FailoverCounts = field(default_factory=FailoverCounts)
    """Counts of lost and replaced environments."""
    completions: CompletionCounts = field(default_factory=CompletionCounts)
    driver: str = ""
    isolation: environments_pb2.Isolation = environments_pb2.ISOLATION_UNSPECIFIED
    _instruction: str = ""
    _finished: dict[int, rollout_pb2.Rollout] = field(default_factory=dict)
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    async def run(self, instruction: str) -> list[rollout_pb2.Rollout]:
        """Run all rollouts of the request; those that the platform lost carry a fault."""
        self._instruction = instruction
        await self.history.load(map(self._rollout_id, self.order.indices))
        async with self._tasks:
            waiting = list(self.order.indices)
            async with self.upcoming:
                self.start.begin()
                granted = await self.slots.acquire(len(waiting))
            while granted:
                batch, waiting = waiting[:granted], waiting[granted:]
                self._tasks.create_task(
                    self._launch(batch, attempt=0), name=self._rollout_id(batch[0])
                )
                granted = await self.slots.acquire(len(waiting)) if waiting else 0
        return [self._finished[index] for index in self.order.indices]

    def mask_all(self, fault: str) -> list[rollout_pb2.Rollout]:
        """Rollouts with a fault, for a task that cannot be run."""
        return [self._label(lost_rollout(fault), index) for index in self.order.indices]

    def _rollout_id(self, index: int) -> str:
        return self.order.rollout_id(index)

    async def _launch(self, indices: Sequence[int], *, attempt: int) -> None:
        """Start each of some siblings as an environment for it becomes ready."""
        taken = await asyncio.gather(*(self._take_over(index, attempt) for index in indices))
        left = [index for index, has_lease in zip(indices, taken, strict=True) if not has_lease]
        if left:
            await self._lease(left, attempt)

    async def _lease(self, left: list[int], attempt: int) -> None:
        """Lease environments for siblings that have none."""
        try:
            snapshot = await self.start.snapshot()
            while snapshot is not None and left:
                left = await self._fork(left, snapshot, attempt)
                if left:
                    snapshot = await self.start.next_snapshot(snapshot, siblings=len(left))
            if left:
                request = self.environments.launch_request(left, attempt)
                await self._start_each(left, request, None, attempt)
        except SetupFailedError as error:
            for index in left:  # another attempt would fail as well
                failed = LaunchResult(0, None, f"{error.reason}: {error}")
                self._start_attempt(index, failed, None, self.order.limits.retries)
        except EtudeError as error:
            for index in left:
                self._start_attempt(index, LaunchResult(0, None, str(error)), None, attempt)

    async def _take_over(self, index: int, attempt: int) -> bool:
        """Go on in the environment of an earlier worker; False if there is none."""
        take, is_whole = self.environments.take_over, self._is_whole
        lease = await self.history.take_over(self._rollout_id(index), take, is_whole=is_whole)
        if lease is not None:
            self._start_attempt(index, LaunchResult(0, lease, ""), None, attempt)
        return lease is not None

    @property
    def _is_whole(self) -> bool:
        """True if the change at its end is all that a rollout leaves."""
        return not self.steps and not self.saves_end_state

    async def _fork(
        self, indices: Sequence[int], snapshot: GroupSnapshot, attempt: int
    ) -> list[int]:
        """Start siblings as forks; return those that could not be forked."""
        request = fork_request(
            self.environments.launch_request(indices, attempt),
            snapshot.snapshot_id,
            count=len(indices),
        )
        request.queue_timeout_seconds = FORK_WAIT_S
        return await self._start_each(indices, request, snapshot, attempt)

    async def _start_each(
        self,
        indices: Sequence[int],
        request: environments_pb2.LaunchBatchRequest,
        snapshot: GroupSnapshot | None,
        attempt: int,
    ) -> list[int]:
        """Start siblings as their environments become ready; return forks that there were not.

        Raises:
            UnavailableError: the broker stayed away, and no sibling was lost with a fork.
        """
        left = set(indices)
        try:
            async for launch in self.environments.leases.launch(request):
                if launch.lease is not None or snapshot is None:
                    index = indices[launch.place]
                    left.discard(index)
                    self._start_attempt(index, launch, snapshot, attempt)
        except EtudeError as error:
            log.warning("%s: %s", self.order.group_id, error)
            if snapshot is None:
                for index in left:
                    self._start_attempt(index, LaunchResult(0, None, str(error)), None, attempt)
                return []
        return sorted(left)

    def _start_attempt(
        self, index: int, launch: LaunchResult, snapshot: GroupSnapshot | None, attempt: int
    ) -> None:
        self._tasks.create_task(
            self._attempt(index, launch, snapshot, attempt=attempt), name=self._rollout_id(index)
        )

    async def _attempt(
        self, index: int, launch: LaunchResult, snapshot: GroupSnapshot | None, *, attempt: int
    ) -> None:
        """Run one attempt at one rollout, and another after a fault.

        The lease is kept for an attempt that goes on in it. One that is cut off, as by the end of
        this process, leaves it to a successor.
        """
        environment: FailoverEnvironment | None = None
        try:
            try:
                if launch.lease is None:
                    rollout = lost_rollout(f"no environment: {launch.failure}")
                else:
                    self.driver, self.isolation = launch.lease.driver, launch.lease.isolation
                    environment = self._open_environment(index, launch.lease, attempt)
                    rollout = await self._roll_out(index, environment, snapshot)
            finally:
                self.slots.release()
            is_fault = rollout.ending == rollout_pb2.ENDING_PLATFORM_FAULT
            is_retried = is_fault and attempt < self.order.limits.retries
            is_kept = is_retried and self.history.has_lease(self._rollout_id(index))
            if environment is not None and not is_kept:
                self.environments.leases.release([environment.lease.lease_id])
            if is_retried:
                log.warning("rollout %s is retried: %s", self._rollout_id(index), rollout.fault)
                self.retried += 1
                await self.slots.acquire(1)
                await self._launch([index], attempt=attempt + 1)
                return
        except BaseException:
            if environment is not None:
                self.environments.leave(environment.lease.lease_id)
            raise
        if is_fault:
            self.history.count_masked(self._rollout_id(index))
        self._finished[index] = self._label(rollout, index)

    def _label(self, rollout: rollout_pb2.Rollout, index: int) -> rollout_pb2.Rollout:
        rollout.rollout_id, rollout.group_id = self._rollout_id(index), self.order.group_id
        rollout.task_id, rollout.index = self.order.task_id, index
        rollout.seed = self._seed(index)
        return rollout

    def _seed(self, index: int) -> int:
        return derive_seed(self.order.seed, "rollout", index)

    def _open_environment(
        self, index: int, lease: environments_pb2.Lease, attempt: int
    ) -> FailoverEnvironment:
        outage = OutageBudget(self.config.outage_s)
        source = RolloutEnvironments(self.environments, index, attempt, outage, self.start.setup)
        environment = FailoverEnvironment(
            leases=self.environments.leases,
            source=source,
            log=CallLog(self.tools.tools),
            outage=outage,
            current=source.environment(lease),
            tally=self.tally,
        )
        if isinstance(self.chat, ChatFormat):  # endpoints give no tokens
            environment.recorder = self.history.recorder(
                self._rollout_id(index), index, attempt=attempt, lost_s=lambda: outage.lost_s
            )
            environment.load_calls(environment.recorder.rollout)
        return environment

    async def _roll_out(
        self, index: int, environment: FailoverEnvironment, snapshot: GroupSnapshot | None
    ) -> rollout_pb2.Rollout:
        """Run a rollout in its environment, in a trace span of its own."""
        with _TRACER.start_as_current_span("invoke_agent etude") as span:
            span.set_attributes(
                {
                    "gen_ai.operation.name": "invoke_agent",
                    "gen_ai.agent.name": "etude",
                    "gen_ai.conversation.id": self._rollout_id(index),
                    "etude.run": self.config.run,
                    "etude.group.id": self.order.group_id,
                    "etude.task.id": self.order.task_id,
                    "etude.lease.id": environment.lease.lease_id,
                }
            )
            fault: Exception | None = None
            try:
                await self._set_up(environment, snapshot)
                rollout = await self._run(index, environment)
                if snapshot is not None and not self.saves_end_state:
                    rollout.snapshot_id = snapshot.snapshot_id
            except FAULTS as error:
                fault, rollout = error, lost_rollout(str(error))
            if rollout.fault and environment.recorder is not None:
                self.history.keep(environment.recorder, fault, is_sound=environment.is_sound)
            span.set_attribute("etude.ending", rollout_pb2.Ending.Name(rollout.ending))
            span.set_attribute("etude.policy.min", rollout.oldest.number)
            span.set_attribute("etude.policy.max", rollout.newest.number)
            if rollout.fault:
                span.set_attribute("etude.fault", rollout.fault[:200])
            ids = span.get_span_context()
            rollout.trace_id, rollout.span_id = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"
        return rollout

    async def _set_up(
        self, environment: FailoverEnvironment, snapshot: GroupSnapshot | None
    ) -> None:
        """Set up an environment that is no fork of one that was, and repeat recorded calls in it.

        Raises:
            SetupFailedError: a command failed.
            DivergedError: a repeated call had another result.
            AioRpcError: the host refuses, or went away.
        """
        if environment.current.known is None:
            await self._prepare(environment, snapshot)
        recorder = environment.recorder
        if recorder is not None:
            if recorder.num_carried:
                is_taken = environment.current.known is not None
                resume = Resume.CONTINUED if is_taken else Resume.REPLAYED
                if not is_taken:
                    await environment.rebuild()
                self.history.count_resume(recorder, resume)
            recorder.start(environment.lease)

    async def _prepare(
        self, environment: FailoverEnvironment, snapshot: GroupSnapshot | None
    ) -> None:
        counts = self.start.counts
        if snapshot is not None:
            counts.forked += 1
        elif self.start.setup.commands:
            counts.separate += 1
            await environment.source.set_up(environment.lease)
        else:
            counts.unprepared += 1

    async def _run(self, index: int, environment: FailoverEnvironment) -> rollout_pb2.Rollout:
        limits, outage = self.order.limits, environment.outage
        progress = StepProgress(self.steps, environment)
        await progress.begin_first()
        started = time.monotonic()
        trajectory = await self._sample(index, environment, progress)
        is_late = environment.own_s(started) >= limits.timeout_seconds
        if was_cut_off(trajectory, is_late=is_late):
            return lost_rollout(
                f"stopped after waiting {outage.lost_s:.0f} s for engines or sandbox hosts"
            )
        rollout = to_rollout_message(trajectory)
        await self.history.store_routes(self._rollout_id(index), trajectory, rollout)
        try:
            is_whole = self._is_whole and trajectory.ending is not RolloutEnding.TIME_LIMIT
            rollout.diff = await (environment.last_diff() if is_whole else environment.diff())
            rollout.steps.extend(progress.records())
            check_changes(rollout)
        except ChangeTooLargeError as error:
            rollout.ending, rollout.fault = rollout_pb2.ENDING_CHANGE_TOO_LARGE, str(error)
            rollout.ClearField("diff")
            rollout.ClearField("steps")
            return rollout
        if self.saves_end_state:
            rollout.snapshot_id = await environment.snapshot_end()
        return rollout

    async def _sample(
        self, index: int, environment: FailoverEnvironment, progress: StepProgress
    ) -> Trajectory:
        """The policy's work in the environment."""
        order, outage, recorder = self.order, environment.outage, environment.recorder
        has_ended = recorder is not None and self._is_whole and bool(recorder.rollout.changes)
        used_s = 0.0 if recorder is None or has_ended else recorder.active_s
        bounds = order.bound_rollout(used_s=used_s)
        task = RolloutTask(
            instruction=self._instruction,
            temperature=order.temperature,
            seed=self._seed(index),
            steps=progress if self.steps else None,
        )
        if isinstance(self.chat, EndpointClient):
            policy = EndpointPolicy(
                client=self.chat, tools=self.tools, limits=bounds, task=task, outage=outage
            )
            return await run_endpoint_rollout(policy, environment)
        sampler = EngineSampler(
            engine_of=self.clients.engine_stub,
            router=self.router,
            group_id=order.group_id,
            rollout_id=self._rollout_id(index),
            end_ids=self.chat.end_ids,
            outage=outage,
            timeout_s=self.environments.call_s,
            purpose=order.purpose,
            counts=self.completions,
            records_routes=order.records_routes,
            attempt=recorder.call_prefix if recorder is not None else "",
        )
        trajectory = await run_rollout(
            sampler if recorder is None else RecordedSampler(sampler, recorder, self.chat, outage),
            environment,
            self.chat,
            self.tools,
            bounds,
            task,
            paused_s=lambda: outage.lost_s,
        )
        if recorder is not None:
            recorder.add_earlier_costs(trajectory.costs)
        return trajectory
