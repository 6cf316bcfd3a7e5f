"""Retry policy of failed updates: retry, then load a complete version, then be not ready."""

from dataclasses import dataclass, replace
from enum import Enum

MAX_PREPARES = 3
"""A rank that lacks memory often has it a little later."""

MAX_COMMITS = 2
"""Requests are frozen during each: one retry."""


class Remedy(Enum):
    """The next attempt."""

    RETRY = "the same way again"
    RESEED = "a complete version, in place of what changed"
    GIVE_UP = "a complete version again, and not ready until one is live"


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of ranks since the last version that went live without one."""

    prepares: int = 0
    commits: int = 0
    reseeds: int = 0
    """Complete versions that could not be loaded either."""

    @property
    def remedy(self) -> Remedy:
        """The remedy for these failures."""
        if self.prepares < MAX_PREPARES and self.commits < MAX_COMMITS:
            return Remedy.RETRY
        return Remedy.GIVE_UP if self.reseeds else Remedy.RESEED

    @property
    def reason(self) -> str:
        """Label of the failure that led to a complete version."""
        return "prepare_failed" if self.prepares >= MAX_PREPARES else "commit_failed"

    def in_prepare(self) -> "Failures":
        """These and one failed prepare."""
        return self._and(prepares=1)

    def in_commit(self) -> "Failures":
        """These and one failed activation."""
        return self._and(commits=1)

    def on_the_way(self) -> "Failures":
        """These and one damaged or missing object on the update path: no rank's fault."""
        return self._and()

    def _and(self, *, prepares: int = 0, commits: int = 0) -> "Failures":
        if self.remedy is not Remedy.RETRY:
            return replace(self, reseeds=self.reseeds + 1)
        return replace(self, prepares=self.prepares + prepares, commits=self.commits + commits)
