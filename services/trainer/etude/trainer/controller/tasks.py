"""The order in which a phase uses its tasks: a keyed permutation, so the cursor is one integer."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from etude.common.blobs import Store
from etude.common.errors import Problem, UserError

_ROUNDS = 4
"""Luby and Rackoff: four rounds make a pseudo-random permutation of a keyed function."""

TASK_FILE = "task.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a task set."""

    task_id: str
    """Unique within the run: <task set>/<folder>."""
    uri: str
    """Its folder in Harbor layout."""
    environment: str
    """Entry of roles.environments in which it runs."""


def permuted(index: int, *, size: int, seed: int) -> int:
    """The place that a pseudo-random permutation of [0, size) gives to index.

    Raises:
        ValueError: the index is outside [0, size).

    Source: balanced Feistel network with cycle walking, https://doi.org/10.1007/3-540-45760-7_9.
    """
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside [0, {size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    place = _feistel(index, half=half, seed=seed)
    while place >= size:  # the domain is at most four times too large
        place = _feistel(place, half=half, seed=seed)
    return place


def _feistel(value: int, *, half: int, seed: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (derived_seed(seed, turn, right) & mask)
    return left << half | right


def derived_seed(seed: int, *parts: int | str) -> int:
    """A seed of 63 bits for one purpose, from the seed of a whole phase."""
    text = "\0".join([str(seed), *map(str, parts)]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """The tasks of one phase in the order of its seed; no task comes twice."""

    tasks: tuple[Task, ...]
    seed: int

    def __post_init__(self) -> None:
        if len({task.task_id for task in self.tasks}) != len(self.tasks):
            raise ValueError("a task comes twice")

    def __len__(self) -> int:
        return len(self.tasks)

    def at(self, position: int) -> Task:
        """The task at a position of the order."""
        return self.tasks[permuted(position, size=len(self.tasks), seed=self.seed)]


def find_tasks(store: Store, *, name: str, environment: str) -> tuple[Task, ...]:
    """The tasks of a task set, by folder name.

    Args:
        store: opened at the folder of task folders.
        name: of the task set.
        environment: entry of roles.environments in which they run.

    Raises:
        UserError: no task is there.
    """
    folders = sorted(_folders(info.key for info in store.list("")))
    if not folders:
        raise UserError(
            Problem(
                reason="InvalidSpec",
                what=f"holds no folder with a {TASK_FILE}",
                where=f"task set {name}: {store.url}",
                fix="write tasks there with `etude tasks generate`, or correct the URI",
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
