"""Interface of a curriculum."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.common.api.meta import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledTask:
    """One task, as a curriculum sees it."""

    task_id: str
    """<task set>/<folder>."""
    label: str
    """Difficulty in its task.toml; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTask:
    """One task in a batch of the run."""

    task: LabelledTask
    reward: float
    """Mean of its siblings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumView:
    """Facts that a curriculum may use; all of them are in the journal."""

    untrained: Sequence[LabelledTask]
    """Tasks of the phase in no batch, in the order of the phase's seed."""
    trained: Sequence[TrainedTask]
    """Tasks of the phase in batches, in the order of batches."""
    seed: int
    """Of the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Orders untrained tasks by a pure function.

    It is called again after each batch. Tasks that it leaves out come after those that it names.
    """

    parameters: type[Model]
    """Model of `parameters` in a manifest; an unknown key is refused."""
    # Any: each curriculum takes its own parameters model.
    order: Callable[[CurriculumView, Any], Iterable[str]]
    """Ids of untrained tasks, next first. Equal arguments give equal ids, in any process."""


def mean_rewards(trained: Sequence[TrainedTask]) -> Mapping[str, float]:
    """Mean reward of the trained tasks of each label."""
    rewards: dict[str, list[float]] = {}
    for each in trained:
        rewards.setdefault(each.task.label, []).append(each.reward)
    return {label: sum(found) / len(found) for label, found in rewards.items()}
