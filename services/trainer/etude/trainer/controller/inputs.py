"""What a run starts from: its model and its tasks, found and checked before anything is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.agent.chat import ChatFormat
from etude.common.api.phases import Phase
from etude.common.api.run import RLRunSpec
from etude.common.blobs import Store, probe
from etude.common.errors import Problem, UserError
from etude.common.files import ResolvedRun, materialise, store_for
from etude.trainer.controller.tasks import Task, TaskOrder, find_tasks
from etude.trainer.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSets:
    """Every task of a run, found and counted before anything is started."""

    orders: Mapping[str, TaskOrder]
    """By phase."""
    evaluations: Mapping[str, tuple[Task, ...]]
    """By evaluation."""


def find_task_sets(spec: RLRunSpec) -> TaskSets:
    """Look at all task sets of a run.

    Raises:
        UserError: a set is empty, or a phase needs more tasks than there are.
    """
    orders: dict[str, TaskOrder] = {}
    for phase in spec.phases:
        if phase.tasks is None or phase.algorithm is None:
            continue
        found = [
            task
            for task_set in phase.tasks
            for task in find_tasks(
                store_for(task_set.uri, spec.storage),
                name=task_set.name,
                environment=task_set.environment,
            )
        ]
        _check_count(phase, len(found), phase.algorithm.prompts_per_step * phase.max_steps)
        orders[phase.name] = TaskOrder(tasks=tuple(found), seed=phase.seed)
    evaluations = {
        evaluation.name: find_tasks(
            store_for(evaluation.tasks.uri, spec.storage),
            name=evaluation.tasks.name,
            environment=evaluation.tasks.environment,
        )
        for evaluation in spec.evaluation
    }
    return TaskSets(orders=orders, evaluations=evaluations)


def _check_count(phase: Phase, found: int, needed: int) -> None:
    """Refuse a phase that would run out of tasks.

    Raises:
        UserError: it would.
    """
    if found < needed:
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what=f"needs {needed} tasks (promptsPerStep x maxSteps), and {found} are there;"
                " each is used once",
                where=f"phase {phase.name}",
                fix="add tasks, or lower maxSteps",
            )
        )


class Inputs(NamedTuple):
    """Everything that was found."""

    store: Store
    model_folder: Path
    chat: ChatFormat
    task_sets: TaskSets


def find_inputs(resolved: ResolvedRun, settings: Settings) -> Inputs:
    """Look at everything that a run names.

    Raises:
        UserError: something is missing or does not fit; it says what and where.
    """
    spec = resolved.spec
    store = store_for(spec.storage.uri, spec.storage)
    probe(store)
    model_folder = materialise(spec.model.uri, settings.scratch, spec.storage)
    if not (model_folder / "config.json").is_file():
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what="holds no config.json, so it is no model folder",
                where=f"model.uri: {spec.model.uri}",
                fix="give a Hugging Face model folder",
            )
        )
    return Inputs(store, model_folder, ChatFormat.load(model_folder), find_task_sets(spec))
