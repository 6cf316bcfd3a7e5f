"""State of a route's releases: the version in use, the one before, and the candidate under test."""

from typing import Annotated

from pydantic import BaseModel, Field

from etude.common.release.channels import ChannelExperiment, Sentence, ServedVersion
from etude.common.weights.protocol import records
from etude.feedback.release.rules import CanaryRules

Milliseconds = Annotated[int, Field(ge=0)]


class CanaryState(BaseModel):
    """A candidate that users try. Its rules are those of its start: a plan is fixed before data."""

    model_config = records.STRICT

    candidate: ServedVersion
    experiment: str
    salt: str
    rules: CanaryRules
    step: Annotated[int, Field(ge=0)] = 0
    """Index of the share."""
    started_ms: Milliseconds
    step_ms: Milliseconds
    """Start of the step."""
    looks: tuple[float, ...] = ()
    """Information fractions of the looks so far."""
    gate: Sentence
    """Answer of the gate that let it pass."""
    question: Sentence = ""
    """Signal that a person has to decide about; empty while there is none."""
    gain: Sentence = ""
    """Figures by which the candidate is better, once they are enough; promotion may still wait."""

    @property
    def share(self) -> int:
        return self.rules.steps[self.step]

    @property
    def assignment(self) -> ChannelExperiment:
        return ChannelExperiment(name=self.experiment, salt=self.salt, share=self.share)


class ReleaseState(BaseModel):
    """Result of all decisions so far."""

    model_config = records.STRICT

    stable: ServedVersion | None = None
    previous: ServedVersion | None = None
    """Version to roll back to."""
    canary: CanaryState | None = None
    freeze: Sentence = ""
    """Reason for which only roll-backs are made; empty if there is none."""
    window: Annotated[int, Field(ge=0)] = 0
    """Newest window of rollouts whose monitors led to a freeze."""
