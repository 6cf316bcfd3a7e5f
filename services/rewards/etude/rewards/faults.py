"""Why a rollout could not be scored: the closed list of reasons."""

from enum import StrEnum
from typing import NamedTuple


class FaultReason(StrEnum):
    """Each is the platform's, so the rollout is masked; what the policy broke is scored."""

    ROLLOUT_FAULT = "RolloutFault"
    """The rollout itself ended in a platform fault."""
    ENVIRONMENT_LOST = "EnvironmentLost"
    """No environment could be had or it went away while grading, on every attempt."""
    GRADER_ERROR = "GraderError"
    """The verifier gives no valid reward even for the unmodified repository."""
    INVALID_TASK = "InvalidTask"
    """The task's folder cannot be read."""


class Fault(NamedTuple):
    """One rollout without a reward."""

    reason: FaultReason
    message: str
