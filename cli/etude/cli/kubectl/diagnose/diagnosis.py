"""Diagnosis of a run, route or evaluation: the cause, its evidence and a suggested fix."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

RUNBOOKS = "docs/runbooks"
STANDS_STILL = f"{RUNBOOKS}/a-run-does-not-progress.md"
VERSIONS_WAIT = f"{RUNBOOKS}/versions-do-not-reach-the-engines.md"
VERSION_REFUSED = f"{RUNBOOKS}/a-version-is-refused.md"
ENVIRONMENTS_WAIT = f"{RUNBOOKS}/environments-are-waited-for.md"
USERS_UNSERVED = f"{RUNBOOKS}/users-are-not-served.md"
CANDIDATE_WAITS = f"{RUNBOOKS}/a-candidate-does-not-reach-users.md"
ENVIRONMENT_LOST = f"{RUNBOOKS}/an-environment-was-lost.md"
CHECKPOINT_STAYS = f"{RUNBOOKS}/a-checkpoint-does-not-go.md"


class Advice(NamedTuple):
    """Meaning of one reason, and a suggested fix."""

    means: str
    do: str = ""
    """Empty where nothing needs to be done; {run} stands for the run's name."""
    runbook: str = STANDS_STILL


class RunState(StrEnum):
    """State of a run, route or evaluation, as the diagnosis says it."""

    PROGRESSES = "progresses"
    """Steps finish, though something else may be wrong."""
    WAITS = "waits"
    """It continues without help."""
    STANDS_STILL = "does not progress"
    """A person has to act."""
    RESTS = "rests"
    """It was suspended."""
    OVER = "is over"
    """It is complete."""
    FAILED = "failed"
    """It ended and does not go on."""
    SERVES = "serves"
    """Users of a route get answers, though something else may be wrong."""
    UNSERVED = "does not serve"
    """Users of a route get no answers until a person acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The first cause, its evidence, and a suggested fix."""

    name: str
    """Of the run, route or evaluation."""
    state: RunState
    reason: str
    """Reason code: one of the reference, or of Kubernetes, or of the run's own processes."""
    cause: str
    """One sentence without a full stop."""
    evidence: tuple[str, ...] = ()
    """Observations, in the words of their source."""
    do: str = ""
    """Suggested fix; empty when nothing needs to be done."""
    runbook: str = STANDS_STILL
    kind: str = "run"
    """Noun by which programs know the name."""

    @property
    def sentence(self) -> str:
        """State and cause on one line."""
        return f"{self.name} {self.state}: {self.cause}  [{self.reason}]"

    def lines(self) -> list[str]:
        """The whole diagnosis for people."""
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
        """The diagnosis for programs."""
        return {
            self.kind: self.name,
            "state": self.state.name.title().replace("_", ""),
            "reason": self.reason,
            "cause": self.cause,
            "evidence": list(self.evidence),
            "do": self.do,
            "runbook": self.runbook,
        }


def last_line(words: str) -> str:
    """A message on one line: the last of several lines, which in a traceback says most."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return f"… {lines[-1]}" if len(lines) > 1 else "".join(lines)
