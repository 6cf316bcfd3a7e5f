"""Retry policy of failed updates: retry, then load a complete version, then be not ready."""

from dataclasses import dataclass, replace
from enum import Enum

MAX_PREPARES = 3
"""A rank that lacks memory often has it a little later."""

MAX_ACTIVATIONS = 2
"""Requests are frozen during each: one retry."""


class UpdateRemedy(Enum):
    """The next attempt."""

    RETRY = "the same way again"
    RESEED = "a complete version, in place of what changed"
    GIVE_UP = "a complete version again, and not ready until one is live"


@dataclass(frozen=True, slots=True)
class UpdateFailures:
    """Failures of ranks since the last version that went live without one."""

    prepares: int = 0
    activations: int = 0
    reseeds: int = 0
    """Complete versions that could not be loaded either."""

    @property
    def remedy(self) -> UpdateRemedy:
        """The remedy for these failures."""
        if self.prepares < MAX_PREPARES and self.activations < MAX_ACTIVATIONS:
            return UpdateRemedy.RETRY
        return UpdateRemedy.GIVE_UP if self.reseeds else UpdateRemedy.RESEED

    @property
    def reason(self) -> str:
        """Label of the failure that led to a complete version."""
        return "prepare_failed" if self.prepares >= MAX_PREPARES else "commit_failed"

    def add_prepare(self) -> "UpdateFailures":
        """These and one failed prepare."""
        return self._add(prepares=1)

    def add_activation(self) -> "UpdateFailures":
        """These and one failed activation."""
        return self._add(commits=1)

    def add_path(self) -> "UpdateFailures":
        """These and one damaged or missing object on the update path: no rank's fault."""
        return self._add()

    def _add(self, *, prepares: int = 0, commits: int = 0) -> "UpdateFailures":
        if self.remedy is not UpdateRemedy.RETRY:
            return replace(self, reseeds=self.reseeds + 1)
        return replace(
            self, prepares=self.prepares + prepares, activations=self.activations + commits
        )
