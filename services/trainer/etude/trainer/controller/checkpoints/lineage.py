"""Lineage of checkpoints: branches that begin at restores, and the ancestors of a branch."""

from collections.abc import Iterable
from typing import NamedTuple

from etude.common.checkpoints.manifest import CheckpointId
from etude.common.role_inputs import ResumeAt
from etude.v1 import journal_pb2


class Branch(NamedTuple):
    """Branch of a run's checkpoints.

    A branch begins at every restore to an older checkpoint. Later checkpoints of the earlier branch
    stay in the store, but are not ancestors of the new one.
    """

    number: int = 0
    """0 until the first restore."""
    path: tuple[CheckpointId, ...] = ()
    """The last checkpoints of the branches that led here, oldest first."""

    def to_proto(self) -> journal_pb2.JournalBranch:
        """Convert to the journal's message."""
        path = [journal_pb2.JournalPlace(branch=each.branch, step=each.step) for each in self.path]
        return journal_pb2.JournalBranch(number=self.number, path=path)

    @classmethod
    def from_proto(cls, body: journal_pb2.JournalBranch) -> "Branch":
        """Convert from the journal's message."""
        return cls(body.number, tuple(CheckpointId(each.branch, each.step) for each in body.path))


def is_new_branch(asked: ResumeAt | None, present: Branch) -> bool:
    """True if a requested restore is new; each request is served once."""
    return asked is not None and asked.number > present.number


def ancestors(places: Iterable[CheckpointId], branch: Branch) -> list[CheckpointId]:
    """Checkpoints of a branch and its ancestors, newest first."""
    stretches = [CheckpointId(branch.number, -1), *reversed(branch.path)]
    known = sorted(places, reverse=True)
    return [
        place
        for last in stretches
        for place in known
        if place.branch == last.branch and (last.step < 0 or place.step <= last.step)
    ]


def restore_candidates(places: Iterable[CheckpointId], asked: ResumeAt) -> list[CheckpointId]:
    """Candidates for a requested checkpoint: itself, then older ones of its branch."""
    if asked.step is None:
        return []
    return ancestors((p for p in places if p.step <= (asked.step or 0)), Branch(asked.branch))
