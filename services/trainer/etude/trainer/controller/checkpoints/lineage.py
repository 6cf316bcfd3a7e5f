"""Where a run was put back to, and which checkpoints are therefore its past."""

from collections.abc import Iterable
from typing import NamedTuple

from etude.common.checkpoints import Place
from etude.common.files import ResumeAt
from etude.v1 import journal_pb2


class Branch(NamedTuple):
    """The way that a run has gone so far.

    Every time that it is put back a branch begins. What was written behind the place that it was
    put back to stays in the store, and is no past of what comes now.
    """

    number: int = 0
    """0 until the run is put back."""
    path: tuple[Place, ...] = ()
    """The last checkpoints of the branches that led here, oldest first."""

    def to_proto(self) -> journal_pb2.JournalBranch:
        """As the journal keeps it."""
        path = [journal_pb2.JournalPlace(branch=each.branch, step=each.step) for each in self.path]
        return journal_pb2.JournalBranch(number=self.number, path=path)

    @classmethod
    def from_proto(cls, body: journal_pb2.JournalBranch) -> "Branch":
        """Likewise, back again."""
        return cls(body.number, tuple(Place(each.branch, each.step) for each in body.path))


def is_new(asked: ResumeAt | None, present: Branch) -> bool:
    """Whether the run is to be put back now; that is done once for each time it is asked."""
    return asked is not None and asked.number > present.number


def past(places: Iterable[Place], branch: Branch) -> list[Place]:
    """The checkpoints from which a run may go on as if nothing had happened, the newest first."""
    stretches = [Place(branch.number, -1), *reversed(branch.path)]
    known = sorted(places, reverse=True)
    return [
        place
        for last in stretches
        for place in known
        if place.branch == last.branch and (last.step < 0 or place.step <= last.step)
    ]


def targets(places: Iterable[Place], asked: ResumeAt) -> list[Place]:
    """What may stand for the checkpoint that was asked for: it, then older ones of its branch."""
    if asked.step is None:
        return []
    return past((p for p in places if p.step <= (asked.step or 0)), Branch(asked.branch))
