"""Formats of tasks and the results of an import: a task, or the error that rejects it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingImport:
    """One task to import."""

    name: str
    """Name until it has an id."""
    take: Callable[[], ImportedTask]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFormat:
    """Format that an installed package registers."""

    find_tasks: Callable[[Path], Iterable[PendingImport]]
    """Called with the source that the user names; it may be read while tasks are taken."""
