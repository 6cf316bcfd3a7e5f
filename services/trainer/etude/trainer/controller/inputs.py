"""Inputs of a run: storage, model and tasks, checked before anything is started."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from etude.agent.chat import ChatFormat, Vocabulary, plain
from etude.agent.chat.trial import check_chat_format
from etude.agent.toolsets import toolset
from etude.common.api.run.context_extension import check_extension
from etude.common.api.run.phases import Phase
from etude.common.api.run.spec import RLRunSpec, has_changes
from etude.common.blobs import Store, probe
from etude.common.errors import EtudeError, Problem, UserError
from etude.common.model_sources.extended import ModelChanges
from etude.common.model_sources.run_model import extend_run_model, mirror_run_model
from etude.common.role_inputs import ResolvedRun
from etude.common.store_urls import folder_of
from etude.common.stores import WEIGHT_SUFFIXES, local_folder, open_run_store, open_source
from etude.common.weights.protocol.epochs import latest_epoch
from etude.trainer.controller.admission.task_choice import curriculum_path, open_choice
from etude.trainer.controller.admission.task_labels import label_tasks
from etude.trainer.controller.admission.tasks import TaskOrder, UsedTasks
from etude.trainer.rollouts.tasks import Task, find_tasks
from etude.trainer.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSets:
    """All tasks of a run."""

    orders: Mapping[str, TaskOrder]
    """By phase."""
    evaluations: Mapping[str, tuple[Task, ...]]
    """By evaluation; unusable ones are left out, and reported when they are due."""


def find_task_sets(spec: RLRunSpec, *, is_begun: bool) -> TaskSets:
    """Find and count the tasks of all task sets of a run.

    Args:
        spec: of the run.
        is_begun: True if the run has trained already: then an unusable evaluation, which may be
            added while it trains, is no error.

    Raises:
        UserError: a set is empty, or a phase needs more tasks than are left.
        EtudeError: a store does not answer.
        OSError: a folder may not be read.
    """
    orders: dict[str, TaskOrder] = {}
    used = UsedTasks()
    for phase in spec.phases:
        if phase.tasks is None or phase.algorithm is None:
            continue
        found = [
            task
            for task_set in phase.tasks
            for task in find_tasks(
                open_source(task_set.uri, spec.storage),
                name=task_set.name,
                environment=task_set.environment,
            )
        ]
        if phase.curriculum is not None:
            found = label_tasks(found, spec.storage)
        order = TaskOrder(tasks=tuple(found), seed=phase.seed)
        open_choice(order, phase.curriculum, at=curriculum_path(spec, phase))
        needed = phase.algorithm.prompts_per_step * phase.max_steps
        _check_count(phase, used.count_left(order), needed)
        used.add_phase(order, needed, is_ordered=phase.curriculum is None)
        orders[phase.name] = order
    evaluations: dict[str, tuple[Task, ...]] = {}
    for evaluation in spec.evaluation:
        try:
            evaluations[evaluation.name] = find_tasks(
                open_source(evaluation.tasks.uri, spec.storage),
                name=evaluation.tasks.name,
                environment=evaluation.tasks.environment,
            )
        except (OSError, EtudeError) as error:
            if not is_begun:
                raise
            log.warning("evaluation %s: %s", evaluation.name, error)
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
                what=f"needs {needed} tasks (promptsPerStep x maxSteps), and there are {found}"
                " that no earlier phase uses; each is used once per run",
                where=f"phase {phase.name}",
                fix="add tasks, or lower maxSteps",
            )
        )


def _storage(spec: RLRunSpec) -> Store:
    try:
        return open_run_store(spec.storage.uri, spec.storage)
    except OSError as cause:
        raise UserError(
            Problem(
                reason="InvalidStorage",
                what=f"cannot be created: {cause}",
                where=f"storage.uri: {spec.storage.uri}",
                fix="name a folder that the run may write to",
            )
        ) from cause


class Inputs(NamedTuple):
    """Storage, model folder, chat format and tasks of a run."""

    store: Store
    model_folder: Path
    chat: ChatFormat | None
    """None if the run has no rollouts, of its own or of users: then a tokenizer is enough."""
    task_sets: TaskSets
    model_uri: str = ""
    """Object store with the weights, which the folder lacks then; empty if it has them."""


def _load_chat(spec: RLRunSpec, model_folder: Path) -> ChatFormat | None:
    """Load the chat format if the run trains rollouts; at least the tokenizer is checked.

    Raises:
        UserError: the model's tokenizer or chat template does not work, or a toolset's package
            is not installed.
    """
    has_rollouts = any(phase.is_rl or phase.is_feedback for phase in spec.phases)
    if has_rollouts or spec.evaluation:
        rollouts = [phase.rollout for phase in spec.phases if phase.rollout is not None]
        tools = {each.toolset: toolset(each.toolset) for each in rollouts}
        native = {each.toolset for each in rollouts if each.tool_format == "Native"}
        schemas = [tools[name].schemas() for name in sorted(native)]
        check_chat_format(model_folder, native_tools=schemas)
        return ChatFormat.load(model_folder)
    Vocabulary.load(model_folder)
    return None


def _prepare_model(spec: RLRunSpec, store: Store, settings: Settings) -> str:
    """URI of the folder that the run starts from, copied and changed as the run asks.

    Raises:
        UserError: the model is refused, or cannot be changed so.
        StoreError: the store does not answer.
    """
    model = spec.model
    folder = mirror_run_model(model.folder, store, scratch=settings.scratch, access=settings.hub)
    if not has_changes(model.key):
        return folder
    changes = ModelChanges(model.add_tokens)
    if model.chat.template == "Plain":
        changes = ModelChanges(model.add_tokens, plain.CHAT_TEMPLATE + "\n", plain.END)
    return extend_run_model(
        model.key, folder, changes, store, scratch=settings.scratch, access=spec.storage
    )


def _check_adapters(spec: RLRunSpec) -> None:
    """Check that new tokens can be told apart: adapters leave their rows equal for ever.

    Raises:
        UserError: the run trains adapters and has new tokens.
    """
    if spec.model.add_tokens and spec.roles.trainer.lora is not None:
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what="leaves the rows of model.addTokens as they are, all of them equal",
                where="roles.trainer.lora",
                fix="remove it, or begin with a model that was trained with these tokens",
            )
        )


def _check_extensions(spec: RLRunSpec, model_folder: Path) -> None:
    """Check the context extensions of all phases, of which the last may begin in days.

    Raises:
        UserError: the model does not allow one.
    """
    for index, phase in enumerate(spec.phases):
        if phase.context_extension is None:
            continue
        try:
            config = json.loads((model_folder / "config.json").read_bytes())
            check_extension(config, phase.context_extension)
        except ValueError as cause:
            raise UserError(
                Problem(
                    reason="InvalidSpec",
                    what=f"cannot be applied: {cause}",
                    where=f"phases[{index}].contextExtension",
                    fix="change it, or train another model",
                )
            ) from cause


def find_inputs(resolved: ResolvedRun, settings: Settings) -> Inputs:
    """Find and check everything that a run names.

    Raises:
        UserError: something is missing or does not fit; it is named.
        StoreError: the store does not answer, or may not be used.
    """
    spec = resolved.spec
    store = _storage(spec)
    probe(store)
    model_uri = _prepare_model(spec, store, settings)
    # Ranks read the weights themselves, each its own part.
    model_folder = local_folder(
        model_uri, settings.scratch, spec.storage, leave_out=WEIGHT_SUFFIXES
    )
    if not (model_folder / "config.json").is_file():
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what="holds no config.json, so it is not a model folder",
                where=f"model.uri: {spec.model.folder}",
                fix="give a Hugging Face model folder",
            )
        )
    _check_adapters(spec)
    _check_extensions(spec, model_folder)
    task_sets = find_task_sets(spec, is_begun=latest_epoch(store) is not None)
    remote_uri = "" if folder_of(model_uri) is not None else model_uri
    return Inputs(store, model_folder, _load_chat(spec, model_folder), task_sets, remote_uri)
