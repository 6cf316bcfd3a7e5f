"""Evaluation on held-out tasks: a sampled pass as in training, and a greedy pass."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from etude.common.api.run.phases import Phase, RolloutPolicy
from etude.common.api.run.spec import Evaluation
from etude.common.errors import EtudeError
from etude.common.stores import open_source
from etude.trainer.controller.admission.dispatch import mask_rollout
from etude.trainer.controller.admission.dropping import QuarantineFilter
from etude.trainer.controller.admission.quarantine_marks import RedrawReason
from etude.trainer.controller.admission.tasks import Task, find_tasks
from etude.trainer.controller.checkpoints.state import EvaluationResult
from etude.trainer.controller.reporting.rows import evaluation_fields, rollout_rows
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.routing.table import Purpose
from etude.trainer.seeding import derive_seed
from etude.v1 import journal_pb2, run_pb2

REDRAWS = 3
"""Redraws of a rollout that a marked engine sampled; after that it counts as lost."""


class EvaluationPass(NamedTuple):
    """Tasks and modes of one evaluation at one step."""

    limit: int | None
    """Tasks at most."""
    is_greedy: bool
    """True if a greedy pass follows the sampled one."""


def due_pass(evaluation: Evaluation, *, step: int, last_step: int) -> EvaluationPass | None:
    """The evaluation that is due after this many steps of the phase; None if none is."""
    is_end = step in {0, last_step}
    if not is_end and step % evaluation.every_steps:
        return None
    limit = None if is_end else evaluation.limit
    is_greedy = evaluation.greedy == "Always" or (evaluation.greedy == "Ends" and is_end)
    return EvaluationPass(limit, is_greedy)


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Runs the evaluations of one phase."""

    run: Run
    phase: Phase
    tasks: dict[str, tuple[Task, ...]]
    """By evaluation of the initial spec."""
    _later_tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict)
    """Task sets of later evaluations, by their JSON."""
    _refused: set[str] = field(default_factory=set)
    """Reported errors of unusable task sets: each is reported once."""
    _filter: QuarantineFilter = field(init=False)

    def __post_init__(self) -> None:
        self._filter = self.run.quarantine_filter()

    def is_due(self) -> bool:
        return any(True for _ in self._due_evaluations())

    async def evaluate(self) -> bool:
        """Run the due evaluations; False if the controller was told to stop meanwhile."""
        for evaluation, key, found in self._due_evaluations():
            tasks = (await self._tasks_of(evaluation))[: found.limit]
            if not tasks:
                continue
            if not await self._evaluate(evaluation.name, tasks, is_greedy=found.is_greedy):
                return False
            self.run.progress.cursor.evaluated.append(key)
        return True

    def _due_evaluations(self) -> Iterator[tuple[Evaluation, str, EvaluationPass]]:
        """Each due evaluation, with the key under which it is recorded as done."""
        cursor = self.run.progress.cursor
        for evaluation in self.run.commands.evaluation:
            if evaluation.phase != self.phase.name:
                continue
            key = f"{evaluation.name}@{self.phase.name}:{cursor.step}"
            found = due_pass(evaluation, step=cursor.step, last_step=self.run.progress.last_step)
            if found is not None and key not in cursor.evaluated:
                yield evaluation, key, found

    async def _tasks_of(self, evaluation: Evaluation) -> tuple[Task, ...]:
        """Tasks of an evaluation, also of one that was added or changed later."""
        first = {e.name: e.tasks for e in self.run.progress.resolved.spec.evaluation}
        if evaluation.name in self.tasks and first.get(evaluation.name) == evaluation.tasks:
            return self.tasks[evaluation.name]
        key = evaluation.tasks.model_dump_json()
        if key not in self._later_tasks:
            try:
                self._later_tasks[key] = await asyncio.to_thread(self._read_tasks, evaluation)
            except (OSError, EtudeError) as error:
                self._refuse(f"{evaluation.name}: {error}")
                return ()
        return self._later_tasks[key]

    def _refuse(self, why: str) -> None:
        if why not in self._refused:
            self._refused.add(why)
            self.run.reporter.record_event("EvaluationSkipped", why, warning=True)

    def _read_tasks(self, evaluation: Evaluation) -> tuple[Task, ...]:
        task_set = evaluation.tasks
        store = open_source(task_set.uri, self.run.progress.resolved.spec.storage)
        return find_tasks(store, name=task_set.name, environment=task_set.environment)

    async def _evaluate(self, name: str, tasks: tuple[Task, ...], *, is_greedy: bool) -> bool:
        run = self.run
        run.reporter.set_state(run_pb2.RUN_STATE_EVALUATING)
        sampled = await run.commands.run_unless_stopped(self._run_pass(name, tasks, greedy=False))
        greedy: list[journal_pb2.JournalRollout] | None = []
        if is_greedy and sampled is not None:
            greedy = await run.commands.run_unless_stopped(self._run_pass(name, tasks, greedy=True))
        run.reporter.set_state(run_pb2.RUN_STATE_RUNNING)
        if sampled is None or greedy is None:
            return False
        if not sampled:
            return True  # reported as incomplete: no rollouts are not a score of 0
        fields = evaluation_fields(name, sampled=sampled, greedy=greedy)
        run.progress.figures.eval_success = fields["success"]
        run.progress.figures.evaluations[name] = EvaluationResult(
            success=fields["success"], greedy_success=fields.get("greedy_success")
        )
        run.reporter.recorder.add_row(run.progress.position().row("eval", **fields))
        run.reporter.record_event("Evaluated", f"{name}: {fields['success']:.3f} of {len(sampled)}")
        return True

    async def _run_pass(
        self, name: str, tasks: Sequence[Task], *, greedy: bool
    ) -> list[journal_pb2.JournalRollout]:
        """Run one rollout per task; leave out those that the platform lost."""
        run = self.run
        mode = "greedy" if greedy else "sampled"
        prefix = f"eval-{name}-{run.progress.cursor.global_step}-{mode}"
        orders = [
            self._order(f"{prefix}-{index}", task, greedy=greedy)
            for index, task in enumerate(tasks)
        ]
        records = await self._draw_trusted(name, orders)
        run.reporter.recorder.write_rollouts(
            run.progress.cursor.global_step,
            f"eval-{name}-greedy" if greedy else f"eval-{name}",
            lambda: rollout_rows(records, run.dispatcher.chat),
        )
        scored = [r for r in records if r.reward.WhichOneof("result") == "reward"]
        if len(scored) < len(records):
            lost = len(records) - len(scored)
            run.reporter.record_event(
                "EvaluationIncomplete", f"{name}: {lost} rollouts were lost", warning=True
            )
        return scored

    async def _draw_trusted(
        self, name: str, orders: Sequence[GroupRequest]
    ) -> list[journal_pb2.JournalRollout]:
        """Run one rollout per request; redraw those that marked weights sampled."""
        marked: Mapping[str, RedrawReason] = {}
        records = await self._run_all(orders)
        for draw in range(1, REDRAWS + 2):
            marked = await self._find_marked(records)
            if not marked or draw > REDRAWS:
                break
            counts = ", ".join(f"{n} {why}" for why, n in Counter(marked.values()).items())
            message = f"evaluation {name}: {len(marked)} rollouts are redrawn: {counts}"
            self.run.reporter.record_event("RolloutsRedrawn", message, warning=True)
            again = [order for order in orders if order.group_id in marked]
            anew = await self._run_all([replace(o, draws=(draw,)) for o in again])
            records = [r for r in records if r.rollout.group_id not in marked] + anew
        for record in records:
            if (why := marked.get(record.rollout.group_id)) is not None:
                mask_rollout(record, f"{why}, after {REDRAWS} redraws", reason="SuspectPolicy")
        return records

    async def _find_marked(
        self, records: Sequence[journal_pb2.JournalRollout]
    ) -> Mapping[str, RedrawReason]:
        """Rollouts that marked weights sampled, by group id, with the reason."""
        await self._filter.refresh()
        scored = [r.rollout for r in records if r.reward.WhichOneof("result") == "reward"]
        found = {each.group_id: self._filter.marks.drop_reason(each) for each in scored}
        return {name: reason for name, reason in found.items() if reason is not None}

    async def _run_all(self, orders: Sequence[GroupRequest]) -> list[journal_pb2.JournalRollout]:
        async with asyncio.TaskGroup() as group:
            pending = [
                group.create_task(self._roll_out(order), name=order.group_id) for order in orders
            ]
        return [record for task in pending for record in task.result()]

    async def _roll_out(self, order: GroupRequest) -> list[journal_pb2.JournalRollout]:
        records = await self.run.dispatcher.run_group(order)
        self.run.progress.figures.evaluated += len(records)
        return [record.record.rollout for record in records]

    def _order(self, group_id: str, task: Task, *, greedy: bool) -> GroupRequest:
        return GroupRequest(
            group_id=group_id,
            task_id=task.task_id,
            task_uri=task.uri,
            environment=task.environment,
            indices=(0,),
            seed=derive_seed(self.phase.seed, group_id),
            temperature=0.0 if greedy else 1.0,
            purpose=Purpose.EVALUATION,
            limits=self.phase.rollout or RolloutPolicy(),
        )
