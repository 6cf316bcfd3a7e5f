"""Choice of the next task of a phase: the shuffled order, or what its curriculum says."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from etude.common.api.meta import Model
from etude.common.api.run.curriculum import CurriculumChoice, check_curriculum
from etude.common.api.run.phases import Phase
from etude.common.api.run.spec import RLRunSpec
from etude.common.errors import Problem, UserError
from etude.trainer.controller.admission.tasks import TaskOrder
from etude.trainer.controller.progress import RunFailedError
from etude.trainer.curricula.base import Curriculum, CurriculumView, LabelledTask, TrainedTask
from etude.trainer.curricula.registry import find_curriculum
from etude.trainer.rollouts.tasks import Task


class CurriculumError(RunFailedError):
    """The curriculum of a phase raised, or named a task that cannot come next."""

    reason = "CurriculumFailed"


class AdmittedTasks(Protocol):
    """Tasks of a run so far, by its ledger."""

    @property
    def consumed(self) -> Collection[str]:
        """Ids of admitted tasks."""

    @property
    def results(self) -> Mapping[str, float]:
        """Mean reward of each task in a batch."""


@dataclass(slots=True, kw_only=True)
class TaskChoice:
    """The tasks of a phase that were not admitted, next first.

    The order depends on batches alone, all of which are journaled, and not on which tasks are under
    way: a controller that takes over goes on in the same order.
    """

    order: TaskOrder
    field_path: str
    """Of the curriculum in the run's spec."""
    curriculum: Curriculum | None = None
    parameters: Model | None = None
    _tasks: Sequence[LabelledTask] = ()
    """By position, for a curriculum."""
    _positions: Mapping[str, int] = field(default_factory=dict)
    _ranked: Sequence[int] = ()
    """Positions, next first."""
    _num_results: int = -1
    """Number of results by which they were ranked."""
    _next: int = 0
    """First of them whose task may be left."""

    def __post_init__(self) -> None:
        if self.curriculum is None:
            self._ranked = range(len(self.order))
            return
        self._tasks = [
            LabelledTask(task_id=task.task_id, label=task.label)
            for task in map(self.order.task_at, range(len(self.order)))
        ]
        self._positions = {task.task_id: place for place, task in enumerate(self._tasks)}

    def next_position(self, admitted: AdmittedTasks) -> int | None:
        """Position of the next task in the phase's order; None if the tasks are used up.

        Raises:
            CurriculumError: the curriculum raised, or named a task that cannot come next.
        """
        self._rank(admitted)
        while self._next < len(self._ranked):
            if self.order.task_at(self._ranked[self._next]).task_id not in admitted.consumed:
                return self._ranked[self._next]
            self._next += 1
        return None

    def upcoming(self, admitted: AdmittedTasks, count: int) -> list[Task]:
        """The next tasks, as far as they are known before the next batch.

        Raises:
            CurriculumError: as for the next one.
        """
        if self.next_position(admitted) is None:
            return []
        tasks = (self.order.task_at(place) for place in islice(self._ranked, self._next, None))
        left = (task for task in tasks if task.task_id not in admitted.consumed)
        return list(islice(left, max(0, count)))

    def _rank(self, admitted: AdmittedTasks) -> None:
        if self.curriculum is None or self._num_results == len(admitted.results):
            return
        view = self._view(admitted)
        places = {each.task_id: self._positions[each.task_id] for each in view.untrained}
        named: dict[int, None] = {}
        for task_id in self._ask_curriculum(self.curriculum, view):
            if not isinstance(task_id, str) or task_id not in places:
                is_trained = isinstance(task_id, str) and task_id in admitted.results
                known = "trained already" if is_trained else "none of the phase"
                raise self._failed(f"names task {task_id!r}, which is {known}")
            if places[task_id] in named:
                raise self._failed(f"names task {task_id!r} twice")
            named[places[task_id]] = None
        self._ranked = list(named | dict.fromkeys(places.values()))
        self._next, self._num_results = 0, len(admitted.results)

    def _view(self, admitted: AdmittedTasks) -> CurriculumView:
        trained = [
            TrainedTask(task=self._tasks[self._positions[task_id]], reward=reward)
            for task_id, reward in admitted.results.items()
            if task_id in self._positions
        ]
        untrained = tuple(each for each in self._tasks if each.task_id not in admitted.results)
        return CurriculumView(untrained=untrained, trained=tuple(trained), seed=self.order.seed)

    def _ask_curriculum(self, curriculum: Curriculum, view: CurriculumView) -> list[object]:
        try:
            # One more than there are shows that one occurs twice, also if they never end.
            return list(islice(curriculum.order(view, self.parameters), len(view.untrained) + 1))
        except Exception as cause:
            raise self._failed(f"raised {type(cause).__name__}: {cause}") from cause

    def _failed(self, what: str) -> CurriculumError:
        return CurriculumError(f"{self.field_path}: the curriculum {what}")


def curriculum_path(spec: RLRunSpec, phase: Phase) -> str:
    """Path of a phase's curriculum in the spec of its run."""
    names = [each.name for each in spec.phases]
    return f"spec.phases[{names.index(phase.name)}].curriculum"


def open_choice(order: TaskOrder, chosen: CurriculumChoice | None, *, at: str) -> TaskChoice:
    """Open the choice of a phase's tasks.

    Args:
        order: of the phase's tasks.
        chosen: the curriculum in the spec; the order of the seed unless set.
        at: path of its field.

    Raises:
        UserError: its package is not installed or broken, or a parameter is refused.
    """
    if chosen is None:
        return TaskChoice(order=order, field_path=at)
    try:
        parameters = check_curriculum(chosen.name, chosen.parameters)
    except ValueError as cause:
        fix = "correct it, or install the package, in the image too"
        raise UserError(
            Problem(reason="InvalidSpec", what=str(cause), where=at, fix=fix)
        ) from cause
    curriculum = find_curriculum(chosen.name)
    return TaskChoice(order=order, field_path=at, curriculum=curriculum, parameters=parameters)
