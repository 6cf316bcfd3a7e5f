"""An answer to the question why a run does not progress."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

RUNBOOKS = "docs/runbooks"
STANDS_STILL = f"{RUNBOOKS}/a-run-does-not-progress.md"
VERSIONS_WAIT = f"{RUNBOOKS}/versions-do-not-reach-the-engines.md"
VERSION_REFUSED = f"{RUNBOOKS}/a-version-is-refused.md"
ENVIRONMENTS_WAIT = f"{RUNBOOKS}/environments-are-waited-for.md"
ENVIRONMENT_LOST = f"{RUNBOOKS}/an-environment-was-lost.md"
CHECKPOINT_STAYS = f"{RUNBOOKS}/a-checkpoint-does-not-go.md"


class Advice(NamedTuple):
    """What one reason means, and what to do about it."""

    means: str
    do: str = ""
    """Empty where nothing needs to be done; {run} stands for the run's name."""
    runbook: str = STANDS_STILL


class State(StrEnum):
    """How a run is doing, for the first words of the answer."""

    PROGRESSES = "progresses"
    """Steps finish, though something may be wrong beside them."""
    WAITS = "waits"
    """It goes on by itself."""
    STANDS_STILL = "does not progress"
    """Somebody has to do something."""
    RESTS = "rests"
    """It was told to."""
    OVER = "is over"
    """It is complete."""
    FAILED = "failed"
    """It ended and does not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The first cause, what shows it, and what to do."""

    run: str
    state: State
    reason: str
    """Reason code: one of the reference, or of Kubernetes, or of the run's own processes."""
    cause: str
    """One sentence without a full stop."""
    evidence: tuple[str, ...] = ()
    """What was seen, in the words of whoever said it."""
    do: str = ""
    """What helps; empty when nothing needs to be done."""
    runbook: str = STANDS_STILL

    @property
    def sentence(self) -> str:
        """State and cause on one line."""
        return f"{self.run} {self.state}: {self.cause}  [{self.reason}]"

    def lines(self) -> list[str]:
        """The whole answer."""
        told = [("because", line) for line in self.evidence]
        if self.do:
            told += [("do", self.do), ("runbook", self.runbook)]
        labels = [
            "" if i and told[i - 1][0] == label else label for i, (label, _) in enumerate(told)
        ]
        return [
            self.sentence,
            *(f"  {label:<9}{line}" for label, (_, line) in zip(labels, told, strict=True)),
        ]

    def as_json(self) -> dict[str, object]:
        """The same for programs."""
        return {
            "run": self.run,
            "state": self.state.name.title().replace("_", ""),
            "reason": self.reason,
            "cause": self.cause,
            "evidence": list(self.evidence),
            "do": self.do,
            "runbook": self.runbook,
        }


def in_short(words: str) -> str:
    """Somebody's words on one line: of several lines, as of a traceback, the last says most."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f"… {lines[-1]}" if len(lines) > 1 else "".join(lines)
