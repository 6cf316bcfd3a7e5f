"""Checks of a real engine that can be broken on purpose: the run must then fail."""

from tests.harness.chaos.mutations import Mutation

from etude.inference.worker.rank import Rank

SOUND = 3
"""Versions that are written: the first one is audited at once, and would not be served."""


def _skip_commit() -> None:
    commit, done = Rank.activate, 0

    def skipped(self: Rank) -> bool:
        """Says that it wrote."""
        nonlocal done
        done += 1
        return commit(self) if done <= SOUND else True

    Rank.activate = skipped  # type: ignore[method-assign]


MUTATIONS = {"label without commit": Mutation(_skip_commit, versions=8)}
