"""Numbers of rollouts that were continued, replayed or redrawn, by cause."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Resume(Enum):
    """Way in which a rollout goes on after a loss."""

    CONTINUED = "continued"
    """In its environment, from its last turn."""
    REPLAYED = "replayed"
    """From its last turn, in another environment in which its calls were repeated."""
    REDRAWN = "redrawn"
    """From nothing."""


class ResumeCause(Enum):
    """Reason for which a rollout had to go on, or to begin again."""

    WORKER = "worker"
    """Its worker died."""
    CONTROLLER = "controller"
    """The controller was replaced, and all workers with it."""
    FAULT = "fault"
    """An attempt ended with a platform fault."""
    DIVERGED = "diverged"
    """Repeated calls or prompts differ from those recorded."""
    UNRECORDED = "unrecorded"
    """No turn of it was recorded, or it cannot be repeated."""


class ResumeKind(NamedTuple):
    """One series of counts."""

    resume: Resume
    cause: ResumeCause


@dataclass(slots=True)
class ResumeCounts:
    """Numbers of rollouts that went on after a loss, and tokens of those that were redrawn."""

    counts: Counter[ResumeKind] = field(default_factory=Counter)
    lost: int = 0
    """Rollouts whose sampled tokens were thrown away."""
    lost_tokens: int = 0

    def add(self, resume: Resume, cause: ResumeCause) -> None:
        """Count one rollout."""
        self.counts[ResumeKind(resume, cause)] += 1

    def add_redrawn(self, cause: ResumeCause, num_tokens: int) -> None:
        """Count a rollout that begins again; unknown tokens are 0 and do not count."""
        self.add(Resume.REDRAWN, cause)
        if num_tokens:
            self.lost += 1
            self.lost_tokens += num_tokens

    def merge(self, other: "ResumeCounts") -> None:
        """Add the counts of another group."""
        self.counts.update(other.counts)
        self.lost += other.lost
        self.lost_tokens += other.lost_tokens

    def total(self, resume: Resume) -> int:
        """Rollouts that went on in one way, for any cause."""
        return sum(count for kind, count in self.counts.items() if kind.resume is resume)
