"""Labels of tasks: the difficulty in their task.toml, for curricula."""

import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from etude.common.api.storage import StoreAccess
from etude.common.errors import Problem, UserError
from etude.common.stores import open_source
from etude.trainer.rollouts.tasks import TASK_FILE, Task

LARGEST_FILE = 1024 * 1024
LONGEST_LABEL = 64
_LOOKUPS = 32
"""Lookups at a time: a bucket answers each within tens of milliseconds."""


def label_tasks(tasks: Sequence[Task], storage: StoreAccess) -> list[Task]:
    """Label tasks by metadata.difficulty of their task.toml; one without it has an empty label.

    Raises:
        UserError: a file is too large or no TOML, or its label is no short text.
        StoreError: the store does not answer.
    """
    with ThreadPoolExecutor(_LOOKUPS, "label-tasks") as pool:
        labels = pool.map(lambda task: _read_label(task, storage), tasks)
        return [replace(task, label=label) for task, label in zip(tasks, labels, strict=True)]


def _read_label(task: Task, storage: StoreAccess) -> str:
    store = open_source(task.uri, storage)
    found = store.head(TASK_FILE)
    if found is None or found.size > LARGEST_FILE:
        raise _refused(task, f"is missing or has more than {LARGEST_FILE} bytes")
    try:
        metadata = tomllib.loads(store.get(TASK_FILE).decode()).get("metadata", {})
    except (ValueError, RecursionError) as cause:
        raise _refused(task, f"is no TOML: {cause}") from cause
    label = metadata.get("difficulty", "") if isinstance(metadata, dict) else ""
    if not isinstance(label, str) or len(label) > LONGEST_LABEL:
        raise _refused(
            task, f"has a metadata.difficulty that is no text of up to {LONGEST_LABEL} characters"
        )
    return label


def _refused(task: Task, what: str) -> UserError:
    where = f"{task.uri}/{TASK_FILE}"
    fix = "correct it, or remove the phase's curriculum"
    return UserError(Problem(reason="InvalidSpec", what=what, where=where, fix=fix))
