"""Tasks of a task set, found in a store."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from etude.common.blobs import Store
from etude.common.errors import Problem, UserError

TASK_FILE = "task.toml"
INSTRUCTION_FILE = "instruction.md"
_LOOKUPS = 32
"""Lookups at a time: a bucket answers each within tens of milliseconds."""
_BATCH = 32 * _LOOKUPS
"""Lookups that wait for their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a task set."""

    task_id: str
    """Unique within the run: <task set>/<folder>."""
    uri: str
    """Its folder in Harbor layout."""
    environment: str
    """Entry of roles.environments in which it runs."""
    label: str = ""
    """Difficulty in its task.toml, read for curricula only; empty if it has none."""


def find_tasks(store: Store, *, name: str, environment: str) -> tuple[Task, ...]:
    """Find the tasks of a task set, sorted by folder name.

    Raises:
        UserError: there is no task, or one has no instruction.
    """
    with ThreadPoolExecutor(_LOOKUPS, "find-tasks") as pool:
        # The files of tasks are never listed: ten thousand tasks may hold millions.
        listed = store.list_folders("")
        folders = _keep_with(store, listed, TASK_FILE, pool)
        complete = {*_keep_with(store, folders, INSTRUCTION_FILE, pool)}
    if not folders:
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what=f"holds no folder with a {TASK_FILE}",
                where=f"task set {name}: {store.url}",
                fix="write tasks there with `etude tasks generate`, or correct the URI",
            )
        )
    for folder in folders:
        if folder not in complete:
            raise UserError(
                Problem(
                    reason="InvalidSpec",
                    what=f"holds a {TASK_FILE} and no {INSTRUCTION_FILE}",
                    where=f"task set {name}: {store.url}/{folder}",
                    fix=f"write its {INSTRUCTION_FILE}, or remove the folder",
                )
            )
    return tuple(
        Task(task_id=f"{name}/{folder}", uri=f"{store.url}/{folder}", environment=environment)
        for folder in folders
    )


def _keep_with(
    store: Store, folders: Sequence[str], file: str, pool: ThreadPoolExecutor
) -> list[str]:
    """The folders that hold a file, in their order."""
    kept = list[str]()
    for first in range(0, len(folders), _BATCH):  # the pool keeps a future for each
        batch = folders[first : first + _BATCH]
        found = pool.map(store.head, [f"{folder}/{file}" for folder in batch])
        kept += [folder for folder, info in zip(batch, found, strict=True) if info is not None]
    return kept
