"""Result of an import: a task, or the error that rejects it."""

from typing import NamedTuple

from etude.common.errors import Problem, UserError
from etude.envserver.storage.trees import File


class ImportRefusedError(UserError):
    """A task that cannot be imported; the message names the place and the rule."""

    def __init__(
        self, where: str, what: str, fix: str = "correct the task, or leave it out"
    ) -> None:
        super().__init__(Problem("InvalidTask", what=what, where=where, fix=fix))


class ImportedTask(NamedTuple):
    """A task folder that is not written yet."""

    task_id: str
    files: dict[str, File]
    notes: tuple[str, ...]
    """What is not as its author had it."""
