"""Tasks of a task set, found in a store."""

from collections.abc import Iterable
from dataclasses import dataclass

from etude.common.blobs import Store
from etude.common.errors import Problem, UserError

TASK_FILE = "task.toml"
INSTRUCTION_FILE = "instruction.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a task set."""

    task_id: str
    """Unique within the run: <task set>/<folder>."""
    uri: str
    """Its folder in Harbor layout."""
    environment: str
    """Entry of roles.environments in which it runs."""


def find_tasks(store: Store, *, name: str, environment: str) -> tuple[Task, ...]:
    """Find the tasks of a task set, sorted by folder name.

    Raises:
        UserError: there is no task, or one has no instruction.
    """
    keys = {info.key for info in store.list("")}
    folders = sorted(_folders(keys))
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
        if f"{folder}/{INSTRUCTION_FILE}" not in keys:
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


def _folders(keys: Iterable[str]) -> Iterable[str]:
    for key in keys:
        folder, _, file = key.rpartition("/")
        if file == TASK_FILE and folder and "/" not in folder:
            yield folder
