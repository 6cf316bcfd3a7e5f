"""Platform faults of rollouts that could not be scored: the closed list of reasons."""

from enum import StrEnum
from typing import NamedTuple


class FaultReason(StrEnum):
    """Reasons of the platform, for which a rollout is masked; policy faults are scored."""

    ROLLOUT_FAULT = "RolloutFault"
    """The rollout itself ended in a platform fault."""
    ENVIRONMENT_LOST = "EnvironmentLost"
    """No environment was granted or it was lost while grading, on every attempt."""
    GRADER_ERROR = "GraderError"
    """The verifier gives no valid reward even for the unmodified repository."""
    JUDGE_FAILED = "JudgeFailed"
    """The model that judges did not answer a majority of the questions."""
    INVALID_TASK = "InvalidTask"
    """The task's folder cannot be read."""


class Fault(NamedTuple):
    """One rollout without a reward."""

    reason: FaultReason
    message: str
