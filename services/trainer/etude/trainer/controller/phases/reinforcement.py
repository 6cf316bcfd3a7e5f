"""Reinforcement-learning phase: admit groups, roll out, score, batch, step, publish."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry import trace

from etude.common.api.run.phases import Algorithm, AsyncLimits, Phase, RolloutPolicy
from etude.common.weights import VersionId
from etude.trainer import metrics
from etude.trainer.controller.admission.dispatch import run_order
from etude.trainer.controller.admission.dropping import Distrust, drop_faulty, drop_group, leave
from etude.trainer.controller.admission.groups import Group, policy_batch
from etude.trainer.controller.admission.plans import soonest, upcoming
from etude.trainer.controller.admission.staleness import Due, StalenessBound
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.controller.journal.ledger import Step
from etude.trainer.controller.phases.evaluation import Evaluator
from etude.trainer.controller.phases.guards import check_faults, check_mismatch
from etude.trainer.controller.phases.targets import measured
from etude.trainer.controller.publishing.in_flight import nobody
from etude.trainer.controller.publishing.pipeline import publish, serve, settle
from etude.trainer.controller.reporting.rows import (
    Faults,
    Row,
    mean,
    policy_fields,
    rollout_row,
    step_figures,
    step_row,
)
from etude.trainer.controller.run import EWMA, Run, RunFailedError
from etude.trainer.export.receipts import NonFiniteWeightsError
from etude.trainer.learner.batches import NonFiniteLossError, StepResult
from etude.trainer.rollouts.protocol import GroupOrder
from etude.trainer.seeding import derived_seed
from etude.v1 import journal_pb2

_TRACER = trace.get_tracer("etude.trainer")


@dataclass(slots=True, kw_only=True)
class Reinforcement:
    """Trains one reinforcement-learning phase from the rollout buffer."""

    run: Run
    phase: Phase
    algorithm: Algorithm
    order: TaskOrder
    evaluator: Evaluator
    bound: StalenessBound = field(init=False)
    limits: RolloutPolicy = field(init=False)
    distrust: Distrust = field(init=False)
    ahead: int = field(init=False)
    """Limit of versions in flight during a step."""
    _tasks: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _in_flight: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _retried: int = field(init=False)
    _dropped: int = field(init=False)
    """Rollouts dropped up to the last step."""

    def __post_init__(self) -> None:
        limits = self.phase.async_limits or AsyncLimits()
        self.bound = StalenessBound(
            groups_per_step=self.algorithm.prompts_per_step,
            max_staleness=limits.max_staleness_versions,
            steps_per_version=self.run.resolved.spec.weights.advanced.steps_per_version,
        )
        # With the bound 0 no step can start before engines serve the last step's version.
        backlog = self.run.resolved.spec.weights.advanced.backlog
        self.ahead = backlog if limits.max_staleness_versions else 0
        self.limits = self.phase.rollout or RolloutPolicy()
        self.distrust = Distrust(self.run)
        self._retried = self.run.figures.retried
        self._dropped = self.run.book.ledger.discarded

    async def train(self) -> bool:
        """Train the phase to its end; False if the controller was told to stop earlier.

        Raises:
            RunFailedError: engine and learner disagree, or too many rollouts were lost.
            NonFiniteLossError: a step failed; nothing was changed by it.
            NonFiniteWeightsError: a step led to NaN or infinite weights.
        """
        run = self.run
        await run.learners.start_phase(self.phase, run.cursor.step)
        run.planner.begin_phase()
        await self._train_again()
        await self._publish()
        run.in_flight.on_change = self._news.set
        async with self._tasks:
            try:
                return await self._to_the_end()
            except (RunFailedError, NonFiniteLossError, NonFiniteWeightsError):
                # The run ends for good; versions that were encoded before are still valid.
                await run.in_flight.room(0)
                raise
            finally:
                run.in_flight.on_change = nobody
                for task in self._in_flight.values():
                    task.cancel()

    async def _to_the_end(self) -> bool:
        is_done = await self._steps()
        if is_done:
            await leave(self.run, self.phase.name, list(self._in_flight.values()))
            await self._publish()
        else:
            await settle(self.run)
        return is_done

    async def _steps(self) -> bool:
        run = self.run
        if not await self.evaluator.evaluate():
            return False
        drop_faulty(run, self._live())
        while run.cursor.step < run.last_step:
            started = time.monotonic()
            groups = await self._next_batch()
            if not groups:
                return not run.orders.halting.is_set()
            with _TRACER.start_as_current_span("step") as span:
                span.set_attributes(
                    {"etude.run": run.resolved.uid, "etude.step": run.cursor.global_step + 1}
                )
                await self._step(groups, waited_s=time.monotonic() - started)
            if self.evaluator.is_due():
                await settle(run)
            if not await self.evaluator.evaluate():
                return False
            if run.cursor.step < run.last_step and await self._boundary():
                return False
        return True

    async def _boundary(self) -> bool:
        """Handle the boundary between two steps; True to stop."""
        if self.run.is_pausing:
            await settle(self.run)
        return await self.run.boundary()

    async def _train_again(self) -> None:
        """Replay batches from the journal that were trained after the checkpoint.

        Raises:
            RunFailedError: the batches are not consecutive.
        """
        run = self.run
        while (step := Step(self.phase.name, run.cursor.step + 1)) in run.book.ledger.batches:
            groups = run.book.ledger.batches[step]
            result = await run.learners.policy_step(policy_batch(groups))
            run.recording.note(self._done(result, groups, waited_s=0.0))
        # Batches of a later phase stay: they exist if an older checkpoint was restored.
        over = {self.phase.name, *run.cursor.finished}
        for left in run.book.ledger.batches:
            if left.phase in over:
                raise RunFailedError(f"the journal holds batch {left}, which no step leads to")

    def _is_version_due(self) -> bool:
        """True after stepsPerVersion steps, at the end, or before an evaluation."""
        step = self.run.cursor.step
        is_last = step == self.run.last_step
        return is_last or not step % self.bound.steps_per_version or self.evaluator.is_due()

    async def _publish(self, *, ahead: int = 0) -> Row:
        """Publish the current weights and have engines activate them; return the row's timings."""
        run = self.run
        if not await publish(run, ahead=ahead, is_served=True) and not ahead:
            await serve(run)
        swap_ms = run.engines.last_pause_s * 1e3
        return {"publish_seconds": round(run.publish_s, 4), "swap_ms": round(swap_ms, 2)}

    @property
    def _serving(self) -> int:
        """Steps of the phase in the version that the engines in rotation serve."""
        served = self.run.served
        return 0 if served is None else self._position(served) or 0

    def _position(self, version: VersionId) -> int | None:
        step = self.run.book.ledger.versions.get(version)
        return None if step is None else max(0, step - self.run.cursor.starts[self.phase.name])

    def _live(self) -> list[Group]:
        return [g for g in self.run.book.ledger.live.values() if g.phase == self.phase.name]

    def _is_ready(self, group: Group) -> bool:
        return not group.missing(self.algorithm.group_size)

    def _due(self, group: Group) -> Due:
        oldest = group.oldest(self._position) if self._is_ready(group) else group.serving
        return Due(group.group_id, self.bound.deadline(self._serving if oldest is None else oldest))

    async def _next_batch(self) -> list[Group] | None:
        """Wait for the groups of the next step; None to stop, or if the tasks are used up."""
        run = self.run
        while not run.orders.halting.is_set():
            if run.in_flight.is_stuck:
                await settle(run)
            self._drop_late()
            self._admit()
            live = self._live()
            picked = self.bound.pick(
                [self._due(g) for g in live if self._is_ready(g)],
                [self._due(g) for g in live if not self._is_ready(g)],
                trainer=run.cursor.step,
            )
            if picked is not None:
                groups = [run.book.ledger.live[name] for name in picked]
                if await run.unless_halted(self._are_sound(groups)):
                    return groups
                continue
            # Versions in flight may admit more groups.
            if not self._in_flight and not len(run.in_flight):
                run.tell("TasksUsedUp", f"phase {self.phase.name} ends early", warning=True)
                return None
            self._news.clear()
            await run.unless_halted(self._news.wait())
        return None

    async def _are_sound(self, groups: Sequence[Group]) -> bool:
        """True if no rollout of a batch was sampled by marked weights; drops those that were."""
        if await self.distrust.refresh(patiently=not self.ahead):
            return not self.distrust.drop(self._live())
        return not self.distrust.drop(groups)

    def _drop_late(self) -> None:
        """Drop groups that a platform fault made too stale: the bound has priority."""
        run = self.run
        for group in self._live():
            if self._is_ready(group) and self.bound.is_late(
                self._due(group).deadline, trainer=run.cursor.step
            ):
                drop_group(run, group, "stale")
                run.tell("GroupDropped", f"{group.group_id} is too stale", warning=True)

    def _admit(self) -> None:
        """Start groups: first unfinished ones of an earlier controller, then new ones."""
        for group in self._live():
            if not self._is_ready(group) and group.group_id not in self._in_flight:
                self._launch(group)
        new: list[Group] = []
        while (count := self._num_admitted()) < self._limit:
            may = self.bound.can_admit(count, serving=self._serving)
            admitted = self._admit_next() if may else None
            if admitted is None:
                break
            new.append(admitted)
        planner = self.run.planner
        for group in soonest(planner, self.order, new) if self.bound.max_staleness else new:
            self._launch(group)
        # Replacements of a few dropped groups are not a wave.
        size = self.algorithm.prompts_per_step * self.bound.steps_per_version
        if 2 * len(new) >= size:
            left, first = self._limit - count, self.run.book.ledger.cursors[self.phase.name]
            waves = upcoming(self.order, first=first, left=left, wave=size)
            planner.wave(waves, siblings=self.algorithm.group_size)

    @property
    def _limit(self) -> int:
        """Groups of the whole phase."""
        return self.algorithm.prompts_per_step * self.phase.max_steps

    def _num_admitted(self) -> int:
        """Number of groups that were admitted and not dropped."""
        return self.run.book.ledger.trained_groups[self.phase.name] + len(self._live())

    def _admit_next(self) -> Group | None:
        ledger = self.run.book.ledger
        position = ledger.cursors[self.phase.name]
        while position < len(self.order) and self.order.at(position).task_id in ledger.consumed:
            position += 1  # trained in an earlier phase
        if position >= len(self.order):
            return None
        body = journal_pb2.JournalAdmit(
            group_id=f"{self.phase.name}-{position:06d}",
            phase=self.phase.name,
            position=position,
            task_id=self.order.at(position).task_id,
            seed=derived_seed(self.phase.seed, "group", position),
        )
        self.run.book.write(journal_pb2.JournalRecord(admit=body))
        return ledger.live[body.group_id]

    def _launch(self, group: Group) -> None:
        group.serving = self._serving
        task = self._tasks.create_task(self._work(group), name=group.group_id)
        self._in_flight[group.group_id] = task

    async def _work(self, group: Group) -> None:
        task = self.order.at(group.position)
        order = GroupOrder(
            group_id=group.group_id,
            task_id=task.task_id,
            task_uri=task.uri,
            environment=task.environment,
            indices=tuple(group.missing(self.algorithm.group_size)),
            draws=group.draws(self.algorithm.group_size),
            seed=group.seed,
            temperature=1.0,
            targets=self.run.engines.rotation,
            limits=self.limits,
        )
        records = await run_order(self.run, order)
        for record in records:
            self.run.book.write(journal_pb2.JournalRecord(rollout=record))
        self.run.planner.forecast.ended(task.environment, records)
        drop_faulty(self.run, self._live())
        del self._in_flight[group.group_id]
        self._news.set()

    async def _step(self, groups: Sequence[Group], *, waited_s: float) -> None:
        run = self.run
        check_faults(run, groups, self.limits)
        body = journal_pb2.JournalBatch(
            phase=self.phase.name,
            step=run.cursor.step + 1,
            group_ids=[group.group_id for group in groups],
        )
        sequence = run.book.write(journal_pb2.JournalRecord(batch=body))
        # The batch and its rollouts are durable before the learner sees them. If versions may wait
        # while the store is away, the batch is durable before these are published.
        if self.ahead:
            await run.book.journal.durable_or_away(sequence)
        else:
            await run.book.journal.durable(sequence)
        run.batched = sequence
        run.planner.stepped()
        result = await run.learners.policy_step(policy_batch(groups))
        if not run.cursor.step % self.bound.steps_per_version:
            check_mismatch(run, result)
        row = self._done(result, groups, waited_s=waited_s)
        if self._is_version_due():
            row |= await self._publish(ahead=self.ahead)
        run.recording.note(row)
        status = run.reports.status
        status.rollouts.in_flight = len(self._in_flight) * self.algorithm.group_size

    def _done(self, result: StepResult, groups: Sequence[Group], *, waited_s: float) -> Row:
        """Account for a trained batch, and build its row."""
        run = self.run
        step = Step(self.phase.name, run.cursor.step + 1)
        staleness = [
            self.bound.staleness(oldest, trainer=run.cursor.step)
            for group in groups
            if (oldest := group.oldest(self._position)) is not None
        ]
        run.book.ledger.forget(step)
        seconds = waited_s + result.seconds
        self._report(result, groups, staleness)
        version = run.cursor.policy[1] if run.cursor.policy else 0
        run.stepped(result, seconds=seconds)
        records = [group.finished[index] for group in groups for index in group.valid()]
        if records:
            measured(run, step_figures(records))
        worked_s = result.seconds + run.publish_s
        run.throughput.stepped(records, waited_s=waited_s, worked_s=worked_s)
        faults = Faults(
            sum(len(group.masked) for group in groups),
            run.figures.retried - self._retried,
            run.book.ledger.discarded - self._dropped,
        )
        self._retried = run.figures.retried
        self._dropped = run.book.ledger.discarded
        self._write_rollouts(groups)
        return (
            step_row(run.place(), result, seconds=seconds)
            | {"policy_version": version, "rollout_seconds": round(waited_s, 3)}
            | policy_fields(result, records, staleness=staleness, faults=faults)
        )

    def _report(
        self, result: StepResult, groups: Sequence[Group], staleness: Sequence[int]
    ) -> None:
        run, status = self.run, self.run.reports.status
        rewards = [g.finished[i].reward.reward for g in groups for i in g.valid()]
        if rewards:  # a step whose rollouts were all lost has no reward
            status.reward_mean = mean(rewards)
            previous = run.figures.reward_ewma if run.cursor.step else status.reward_mean
            run.figures.reward_ewma = previous + EWMA * (status.reward_mean - previous)
        status.mismatch = result.mismatch_mean
        status.staleness_max = max(staleness, default=0)
        status.staleness_p50 = sorted(staleness)[len(staleness) // 2] if staleness else 0
        status.rollouts.in_flight = len(self._in_flight) * self.algorithm.group_size
        metrics.ENTROPY.set(result.entropy)
        metrics.MISMATCH.set(result.mismatch_mean)
        metrics.REWARD.set(status.reward_mean)
        for positions in staleness:
            metrics.STALENESS.observe(positions)

    def _write_rollouts(self, groups: Sequence[Group]) -> None:
        run = self.run
        records = [group.finished[index] for group in groups for index in sorted(group.finished)]
        run.recording.write_rollouts(
            run.cursor.global_step,
            "train",
            lambda: [rollout_row(record, run.chat) for record in records],
        )
