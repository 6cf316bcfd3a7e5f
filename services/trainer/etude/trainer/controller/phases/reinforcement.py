"""Reinforcement-learning phase: admit groups, roll out, score, batch, step, publish."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry import trace

from etude.common.api.run.async_limits import AsyncLimits
from etude.common.api.run.phases import Algorithm, Phase
from etude.common.api.run.rollout_policy import TrainingRolloutPolicy
from etude.trainer.controller.admission.buffer import RolloutBuffer
from etude.trainer.controller.admission.dropping import (
    QuarantineFilter,
    drop_faulty,
    drop_group,
    drop_surplus,
)
from etude.trainer.controller.admission.groups import RolloutGroup, refuse_unrewarded
from etude.trainer.controller.admission.old_trajectories import OldTrajectories
from etude.trainer.controller.admission.plans import WAVES, order_by_readiness
from etude.trainer.controller.admission.staleness import StalenessBound
from etude.trainer.controller.admission.task_choice import TaskChoice
from etude.trainer.controller.journal.ledger import ignore_group
from etude.trainer.controller.phases.batch_replay import replay_batches
from etude.trainer.controller.phases.batch_training import fetch_contents, train_batch
from etude.trainer.controller.phases.evaluation import Evaluator
from etude.trainer.controller.phases.guards import MismatchGuard, check_faults
from etude.trainer.controller.phases.running_groups import RunningGroups
from etude.trainer.controller.phases.slow_groups import SlowGroups
from etude.trainer.controller.phases.step_accounting import StepAccounting
from etude.trainer.controller.progress import RunFailedError
from etude.trainer.controller.publishing.concurrency import ConcurrencyControl
from etude.trainer.controller.publishing.in_flight import ignore_change
from etude.trainer.controller.reporting.rows import Row
from etude.trainer.controller.run import Run
from etude.trainer.export.receipts import NonFiniteWeightsError
from etude.trainer.learner.batches import RefusedUpdateError
from etude.trainer.learner.routes.replay import replay_mode
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.seeding import derive_seed
from etude.v1 import journal_pb2

_TRACER = trace.get_tracer("etude.trainer")


@dataclass(slots=True, kw_only=True)
class ReinforcementPhase:
    """Trains one reinforcement-learning phase from the rollout buffer."""

    run: Run
    phase: Phase
    algorithm: Algorithm
    choice: TaskChoice
    evaluator: Evaluator
    bound: StalenessBound = field(init=False)
    limits: TrainingRolloutPolicy = field(init=False)
    filter: QuarantineFilter = field(init=False)
    backlog: int = field(init=False)
    """Limit of versions in flight during a step."""
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _running: RunningGroups = field(default_factory=RunningGroups)
    _unfinished: set[str] = field(default_factory=set)
    """Groups that an earlier controller left unfinished, and that were not started again."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _accounting: StepAccounting = field(init=False)
    _buffer: RolloutBuffer = field(init=False)
    _slow: SlowGroups = field(init=False)
    _guard: MismatchGuard = field(init=False)

    def __post_init__(self) -> None:
        limits = self.phase.async_limits or AsyncLimits()
        self.bound = StalenessBound(
            groups_per_step=self.algorithm.prompts_per_step,
            max_staleness=limits.max_staleness_versions,
            steps_per_version=self.run.progress.resolved.spec.weights.advanced.steps_per_version,
        )
        # With the bound 0 no step can start before engines serve the last step's version.
        backlog = self.run.progress.resolved.spec.weights.advanced.backlog
        self.backlog = backlog if limits.max_staleness_versions else 0
        self.limits = self.phase.rollout or TrainingRolloutPolicy()
        self.filter = self.run.quarantine_filter()
        self._accounting = StepAccounting(self.run, self.phase.name, self.bound)
        self._guard = MismatchGuard(self.run.progress)

    async def train(self) -> bool:
        """Train the phase to its end; False if the controller was told to stop earlier.

        Raises:
            RunFailedError: engine and learner disagree, too many rollouts were lost, or the
                curriculum failed.
            RefusedUpdateError: a step failed; nothing was changed by it.
            NonFiniteWeightsError: a step led to NaN or infinite weights.
        """
        run = self.run
        await run.learners.start_phase(self.phase, run.progress.cursor.step)
        run.plans.begin_phase()
        if await replay_batches(run, self._accounting, self.limits):
            return False
        await self._publish()
        run.publishing.queue.on_change = self._changed.set
        self._buffer = RolloutBuffer(
            ledger=run.book.ledger,
            phase=self.phase.name,
            group_size=self.algorithm.group_size,
            bound=self.bound,
            position_of=self._accounting.position,
            serving=lambda: self._serving_position,
        )
        run.book.ledger.on_change = self._buffer.note_change
        limits = self.phase.async_limits or AsyncLimits()
        self._slow = SlowGroups(
            action=limits.on_stale,
            buffer=self._buffer,
            book=run.book,
            reporter=run.reporter,
        )
        async with self._tasks:
            adapting = self._adapt_concurrency()
            try:
                return await self._train_to_end()
            except (RunFailedError, RefusedUpdateError, NonFiniteWeightsError):
                # The run ends for good; versions that were encoded before are still valid.
                await run.publishing.queue.wait_for_room(0)
                raise
            finally:
                run.publishing.queue.on_change = ignore_change
                run.book.ledger.on_change = ignore_group
                if adapting is not None:
                    adapting.cancel()
                self._running.cancel()

    def _adapt_concurrency(self) -> "asyncio.Task[None] | None":
        """Let open completions follow the load of engines, if the phase says so."""
        if self.limits.concurrency is None:
            return None
        control = ConcurrencyControl.of(self.run.publishing.engines, self.limits.concurrency)
        return self._tasks.create_task(control.run(), name="concurrency")

    async def _train_to_end(self) -> bool:
        is_done = await self._steps()
        if is_done:
            await self._running.drop_all(self.run.dispatcher.workers)
            drop_surplus(self.run.book, self.phase.name)
            await self._publish()
        else:
            await self.run.publishing.drain()
        return is_done

    async def _steps(self) -> bool:
        run = self.run
        if await self._accounting.stop_if_frozen() or not await self.evaluator.evaluate():
            return False
        drop_faulty(run.book, self._buffer.groups())
        # Rollouts and turns of versions that were rolled back are drawn again.
        await self.filter.refresh(patiently=not self.backlog)
        self.filter.drop_marked(self._buffer.groups())
        left = self.bound.steps_left(run.progress.cursor.step)
        fetch_contents(run, self._buffer.groups(), steps=left)
        self._unfinished = {
            g.group_id for g in self._buffer.groups() if not self._buffer.is_ready(g)
        }
        old = await OldTrajectories.find(run.store, run.book.ledger.live)
        while run.progress.cursor.step < run.progress.last_step:
            started = time.monotonic()
            groups = await self._next_batch()
            if not groups:
                return not run.commands.stop_requested.is_set()
            with _TRACER.start_as_current_span("step") as span:
                span.set_attributes(
                    {
                        "etude.run": run.progress.resolved.uid,
                        "etude.step": run.progress.cursor.global_step + 1,
                    }
                )
                await self._train_step(groups, waited_s=time.monotonic() - started)
            await old.delete_unneeded(run.book.ledger.live)
            if await self._accounting.stop_if_frozen():
                return False
            if self.evaluator.is_due():
                await run.publishing.drain()
            if not await self.evaluator.evaluate():
                return False
            if run.progress.cursor.step < run.progress.last_step and await self._boundary():
                return False
        return True

    async def _boundary(self) -> bool:
        """Handle the boundary between two steps; True to stop."""
        if self.run.checkpoints.is_pausing:
            await self.run.publishing.drain()
        return await self.run.checkpoints.step_boundary()

    def _is_version_due(self) -> bool:
        """True after stepsPerVersion steps, at the end, or before an evaluation."""
        step = self.run.progress.cursor.step
        is_last = step == self.run.progress.last_step
        return is_last or not step % self.bound.steps_per_version or self.evaluator.is_due()

    async def _publish(self, *, ahead: int = 0) -> Row:
        """Publish the current weights and have engines activate them; return the row's timings."""
        run = self.run
        if not await run.publishing.publish(ahead=ahead, is_served=True) and not ahead:
            await run.publishing.activate_newest()
        swap_ms = run.publishing.engines.last_pause_s * 1e3
        return {"publish_seconds": round(run.publishing.publish_s, 4), "swap_ms": round(swap_ms, 2)}

    @property
    def _serving_position(self) -> int:
        """Steps of the phase in the version that the engines in rotation serve."""
        served = self.run.publishing.served
        return 0 if served is None else self._accounting.position(served) or 0

    async def _next_batch(self) -> list[RolloutGroup] | None:
        """Wait for the groups of the next step; None to stop, or if the tasks are used up."""
        run = self.run
        while not run.commands.stop_requested.is_set():
            if run.publishing.queue.has_setback:
                await run.publishing.drain()
            unfinished = self._buffer.refresh()
            self._drop_late()
            self._launch_missing(unfinished)
            self._admit()
            self._buffer.refresh()
            groups = self._buffer.pick(trainer=run.progress.cursor.step)
            if groups is not None:
                if await run.commands.run_unless_stopped(self._are_trusted(groups)):
                    return groups
                continue
            if slow := self._slow.take(trainer=run.progress.cursor.step):
                for group in slow:
                    self._running.drop(group.group_id, run.dispatcher.workers)
                continue
            # Versions in flight may admit more groups.
            if not len(self._running) and not len(run.publishing.queue):
                run.reporter.record_event(
                    "TasksUsedUp", f"phase {self.phase.name} ends early", warning=True
                )
                return None
            self._changed.clear()
            await run.commands.run_unless_stopped(self._changed.wait())
        return None

    async def _are_trusted(self, groups: Sequence[RolloutGroup]) -> bool:
        """True if no rollout of a batch was sampled by marked weights; drops those that were."""
        if await self.filter.refresh(patiently=not self.backlog):
            return not self.filter.drop_marked(self._buffer.groups())
        return not self.filter.drop_marked(groups)

    def _drop_late(self) -> None:
        """Drop groups that a platform fault made too stale: the bound has priority."""
        run = self.run
        for group in self._buffer.late_groups(trainer=run.progress.cursor.step):
            # Its finished siblings may be too old before the missing ones are drawn again.
            if group.group_id not in self._running:
                drop_group(run.book, group, "stale")
                run.reporter.record_event(
                    "GroupDropped", f"{group.group_id} is too stale", warning=True
                )

    def _launch_missing(self, unfinished: Sequence[RolloutGroup]) -> None:
        """Start unfinished groups of an earlier controller, and those with rollouts to redraw."""
        for group in unfinished:
            if group.group_id in self.run.book.ledger.live and group.group_id not in self._running:
                # What this controller draws again has no turns to go on from.
                self._launch(group, is_continued=group.group_id in self._unfinished)

    def _admit(self) -> None:
        """Start new groups."""
        new: list[RolloutGroup] = []
        while (count := self._num_admitted()) < self._limit:
            may = self.bound.can_admit(count, serving=self._serving_position)
            admitted = self._admit_next() if may else None
            if admitted is None:
                break
            new.append(admitted)
        planner = self.run.plans
        for group in (
            order_by_readiness(planner, self.choice.order, new) if self.bound.max_staleness else new
        ):
            self._launch(group)
        # Replacements of a few dropped groups are not a wave.
        size = self.algorithm.prompts_per_step * self.bound.steps_per_version
        if 2 * len(new) >= size:
            most = min(self._limit - count, WAVES * size)
            ahead = self.choice.upcoming(self.run.book.ledger, most)
            waves = [ahead[start : start + size] for start in range(0, len(ahead), size)]
            planner.report_wave(waves, siblings=self.algorithm.group_size)

    @property
    def _limit(self) -> int:
        """Groups of the whole phase."""
        return self.algorithm.prompts_per_step * self.phase.max_steps

    def _num_admitted(self) -> int:
        """Number of groups that were admitted and not dropped."""
        return self.run.book.ledger.trained_groups[self.phase.name] + len(self._buffer)

    def _admit_next(self) -> RolloutGroup | None:
        ledger = self.run.book.ledger
        position = self.choice.next_position(ledger)
        if position is None:
            return None
        body = journal_pb2.JournalAdmit(
            group_id=f"{self.phase.name}-{position:06d}",
            phase=self.phase.name,
            position=position,
            task_id=self.choice.order.task_at(position).task_id,
            seed=derive_seed(self.phase.seed, "group", position),
            serving=self._serving_position,
        )
        self.run.book.write(journal_pb2.JournalRecord(admit=body))
        return ledger.live[body.group_id]

    def _launch(self, group: RolloutGroup, *, is_continued: bool = False) -> None:
        self._unfinished.discard(group.group_id)
        group.serving = self._serving_position
        if is_continued and group.admitted is not None:
            # Turns that an earlier worker recorded are as old as the group.
            group.serving = min(group.serving, group.admitted)
        request = self._request(group, is_continued=is_continued)
        self._buffer.note_change(group.group_id)
        running = self._run_group(group, request)
        self._running.add(request, self._tasks.create_task(running, name=group.group_id))

    def _request(self, group: RolloutGroup, *, is_continued: bool) -> GroupRequest:
        task, size = self.choice.order.task_at(group.position), self.algorithm.group_size
        return GroupRequest(
            group_id=group.group_id,
            task_id=task.task_id,
            task_uri=task.uri,
            environment=task.environment,
            indices=tuple(group.missing_indices(size)),
            draws=group.draws(size),
            seed=group.seed,
            temperature=1.0,
            limits=self.limits,
            is_continued=is_continued,
            rollbacks=self.filter.marks.list_rollbacks(),
            records_routes=replay_mode(self.phase) == "Recorded",
        )

    async def _run_group(self, group: RolloutGroup, request: GroupRequest) -> None:
        records = await self.run.dispatcher.run_group(request)
        sequences = [self.run.book.write_prepared(record) for record in records]
        self.run.plans.forecast.record_leases(
            request.environment, [record.record.rollout for record in records]
        )
        group.serving = None
        self._buffer.note_change(group.group_id)
        drop_faulty(self.run.book, [group])
        left = self.bound.steps_left(self.run.progress.cursor.step)
        fetch_contents(self.run, [group], steps=left)
        self._running.remove(group.group_id)
        self._changed.set()
        if sequences:
            await self.run.dispatcher.collector.collect(group, after=sequences[-1])

    async def _train_step(self, groups: Sequence[RolloutGroup], *, waited_s: float) -> None:
        run = self.run
        check_faults(run.progress, groups, self.limits)
        refuse_unrewarded(groups)  # before the batch is journaled: a restart drops them
        body = journal_pb2.JournalBatch(
            phase=self.phase.name,
            step=run.progress.cursor.step + 1,
            group_ids=[group.group_id for group in groups],
            penalties=self._accounting.find_penalties(groups),
        )
        sequence = run.book.write(journal_pb2.JournalRecord(batch=body))
        # The batch and its rollouts are durable before the learner sees them. If versions may wait
        # while the store is away, the batch is durable before these are published.
        if self.backlog:
            await run.book.journal.wait_durable_or_store_down(sequence)
        else:
            await run.book.journal.wait_durable(sequence)
        run.publishing.batch_sequence = sequence
        run.plans.report_step()
        result = await train_batch(run, groups, self.limits)
        self._guard.check(result)
        self._report_in_flight()
        await run.checkpoints.wait_before_step_ends()
        row = self._accounting.account_step(result, groups, waited_s=waited_s)
        if self._is_version_due():
            row |= await self._publish(ahead=self.backlog)
        run.reporter.recorder.add_row(row)
        self._report_in_flight()

    def _report_in_flight(self) -> None:
        rollouts = self.run.reporter.status.rollouts
        rollouts.in_flight = len(self._running) * self.algorithm.group_size
