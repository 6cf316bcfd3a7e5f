"""Return of a run to an older version of its weights."""

from typing import NamedTuple

from etude.common.weights import VersionId


class Rollback(NamedTuple):
    """A return to an older version: what later ones of earlier epochs sampled is not trained."""

    epoch: int
    """Opened by the return."""
    newest: int
    """Number of the version that was returned to; -1 if none was left."""

    def abandons(self, version: VersionId) -> bool:
        """True if the version is none of the run's any more."""
        return version.epoch < self.epoch and version.number > self.newest
