"""What follows when ranks fail at versions: another try, a complete version, or not being ready."""

from dataclasses import dataclass, replace
from enum import Enum

MAX_PREPARES = 3
"""What a rank lacks, such as memory, is often there a little later."""

MAX_COMMITS = 2
"""Requests are frozen during each: one retry."""


class Remedy(Enum):
    """What the next try is."""

    RETRY = "the same way again"
    RESEED = "a complete version, in place of what changed"
    GIVE_UP = "a complete version again, and not ready until one is live"


@dataclass(frozen=True, slots=True)
class Failures:
    """How often ranks failed since a version went live as it should."""

    prepares: int = 0
    commits: int = 0
    reseeds: int = 0
    """Complete versions that could not be loaded either."""

    @property
    def remedy(self) -> Remedy:
        """What they ask for."""
        if self.prepares < MAX_PREPARES and self.commits < MAX_COMMITS:
            return Remedy.RETRY
        return Remedy.GIVE_UP if self.reseeds else Remedy.RESEED

    @property
    def reason(self) -> str:
        """Which of them it was that asks for a complete version."""
        return "prepare_failed" if self.prepares >= MAX_PREPARES else "commit_failed"

    def in_prepare(self) -> "Failures":
        """These, and a rank that failed to prepare."""
        return self._and(prepares=1)

    def in_commit(self) -> "Failures":
        """These, and a rank that failed to commit."""
        return self._and(commits=1)

    def on_the_way(self) -> "Failures":
        """These, and what led to a version was damaged or gone: no rank's fault."""
        return self._and()

    def _and(self, *, prepares: int = 0, commits: int = 0) -> "Failures":
        if self.remedy is not Remedy.RETRY:
            return replace(self, reseeds=self.reseeds + 1)
        return replace(self, prepares=self.prepares + prepares, commits=self.commits + commits)
