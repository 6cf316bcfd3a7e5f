"""Facts of rollouts, windows of them, and findings: the values that monitors read and give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

FEWEST_ROLLOUTS = 30
"""A window with fewer rollouts is not judged."""
FEWEST_WINDOWS = 3
"""A reference of fewer windows is not compared with."""


class Action(StrEnum):
    """Consequence of a raised finding."""

    WARN = "Warn"
    """An event for people."""
    PENALISE = "Penalise"
    """The rollouts get the rubric's lowest reward and stay in the batch."""
    FREEZE = "Freeze"
    """No checkpoint is promoted, and the phase pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    """Facts of one rollout or served session; None where they are not known."""

    calls: int = 0
    broken_calls: int = 0
    """Malformed, unknown or refused ones."""
    edits: int = 0
    is_question: bool = False
    """It ended with a question and changed nothing."""
    is_masked: bool = False
    """A platform fault removed it from the batch."""
    ambiguity: float | None = None
    """Of its instruction, from 0 to 1."""
    difficulty: float | None = None
    """Of its task, from 0 to 1, judged by other rollouts than this one."""
    tokens: int | None = None
    entropy: float | None = None
    """Nats per sampled token."""
    visible_passed: float | None = None
    """Share of the tests that the policy can run, from 0 to 1."""
    hidden_passed: float | None = None
    """Share of the hidden tests, from 0 to 1."""
    judge_reward: float | None = None
    """From 0 to 1."""
    has_injection: bool = False
    """Its text addresses a judge or grader."""
    passed_canary: bool = False
    """It passed a task that only a hack can pass."""
    group: str = ""
    """Siblings share it, and a task; empty for a rollout without siblings."""


class Scores(NamedTuple):
    """Mean rewards of one step."""

    training: float
    held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The rollouts of one batch or production window, in order."""

    rollouts: Sequence[RolloutFacts]
    scores: Sequence[Scores] = ()
    """Of the newest steps with both figures, oldest first."""
    previous: Sequence["Window"] = ()
    """Windows between the reference and this one, oldest first, for sums that go on."""


Reference = Sequence[Window]
"""Earlier windows without findings, oldest first; monitors read the newest seven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One monitor's figure of a window, and its limit."""

    monitor: str
    figure: float
    limit: float
    is_raised: bool
    action: Action
    sentence: str
    """The fact for people, with its numbers."""
    rollouts: tuple[int, ...] = ()
    """Positions in the window of the rollouts to penalise."""


class Monitor(NamedTuple):
    """One entry of the registry."""

    name: str
    check: Callable[[Window, Reference], Finding | None]
    """Pure; None where the window or the reference has too little data."""
    is_offence: Callable[[RolloutFacts, Reference], bool] | None = None
    """Pure; true for a rollout that shows what is raised. None where no single one does."""
