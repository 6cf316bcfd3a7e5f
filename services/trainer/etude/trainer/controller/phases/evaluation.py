"""Evaluation on held-out tasks: a sampled pass as in training, and a greedy pass."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.api.run.phases import Phase
from etude.common.api.run.rollout_policy import RolloutPolicy
from etude.common.api.run.spec import Evaluation
from etude.common.errors import EtudeError
from etude.common.stores import open_source
from etude.trainer.controller.admission.dropping import QuarantineFilter
from etude.trainer.controller.checkpoints.state import EvaluationResult
from etude.trainer.controller.reporting.rows import evaluation_fields
from etude.trainer.controller.run import Run
from etude.trainer.rollouts.protocol import GroupRequest
from etude.trainer.rollouts.suites.runner import Marks, Records, SuitePass, SuiteRunner
from etude.trainer.rollouts.tasks import Task, find_tasks
from etude.v1 import journal_pb2, run_pb2


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
            if not await self._evaluate(evaluation, tasks, is_greedy=found.is_greedy):
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

    async def _evaluate(
        self, evaluation: Evaluation, tasks: tuple[Task, ...], *, is_greedy: bool
    ) -> bool:
        run, name = self.run, evaluation.name
        run.reporter.set_state(run_pb2.RUN_STATE_EVALUATING)
        sampled = await run.commands.run_unless_stopped(
            self._run_pass(evaluation, tasks, greedy=False)
        )
        greedy: list[journal_pb2.JournalRollout] | None = []
        if is_greedy and sampled is not None:
            greedy = await run.commands.run_unless_stopped(
                self._run_pass(evaluation, tasks, greedy=True)
            )
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
        self, evaluation: Evaluation, tasks: Sequence[Task], *, greedy: bool
    ) -> list[journal_pb2.JournalRollout]:
        """Run the rollouts of a pass; leave out those that the platform lost."""
        run, name = self.run, evaluation.name
        mode = "greedy" if greedy else "sampled"
        runner = SuiteRunner(
            run_group=self._run_group,
            find_marked=self._find_marked,
            on_redraw=lambda marked: self._report_redraw(name, marked),
        )
        records = await runner.run(
            SuitePass(
                prefix=f"eval-{name}-{run.progress.cursor.global_step}-{mode}",
                tasks=tasks,
                samples=1 if greedy else evaluation.samples,
                temperature=0.0 if greedy else 1.0,
                seed=self.phase.seed,
                limits=self.phase.rollout or RolloutPolicy(),
            )
        )
        split = f"eval-{name}-greedy" if greedy else f"eval-{name}"
        run.dispatcher.write_rollouts(run.progress.cursor.global_step, split, records)
        scored = [r for r in records if r.reward.WhichOneof("result") == "reward"]
        if len(scored) < len(records):
            lost = len(records) - len(scored)
            run.reporter.record_event(
                "EvaluationIncomplete", f"{name}: {lost} rollouts were lost", warning=True
            )
        return scored

    async def _run_group(self, request: GroupRequest) -> list[journal_pb2.JournalRollout]:
        records = await self.run.dispatcher.run_group(request)
        self.run.progress.figures.evaluated += len(records)
        return [record.record.rollout for record in records]

    async def _find_marked(self, records: Records) -> Marks:
        await self._filter.refresh()
        scored = [each for each in records if each.reward.WhichOneof("result") == "reward"]
        found = {each.rollout.rollout_id: self._filter.marks.drop_reason(each) for each in scored}
        return {name: reason for name, reason in found.items() if reason is not None}

    def _report_redraw(self, name: str, marked: Marks) -> None:
        counts = ", ".join(f"{n} {why}" for why, n in Counter(marked.values()).items())
        message = f"evaluation {name}: {len(marked)} rollouts are redrawn: {counts}"
        self.run.reporter.record_event("RolloutsRedrawn", message, warning=True)
