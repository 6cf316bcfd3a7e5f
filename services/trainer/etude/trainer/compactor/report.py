"""Report of a compaction round, and the client that runs rounds."""

from typing import NamedTuple, Protocol

from etude.common.weights.protocol.versions import VersionId
from etude.trainer.compactor.schedule import OVERDUE, ChainState


class FoldedWrite(NamedTuple):
    """A keyframe or a skip that was written to the store."""

    kind: str
    """keyframe or skip."""
    target: VersionId
    num_bytes: int
    seconds: float


class CompactorFailure(NamedTuple):
    """A failed stage of a round, retried by a later one."""

    stage: str
    message: str


class CompactorReport(NamedTuple):
    """Report of one round of the compactor."""

    chain: ChainState
    is_overdue: bool
    """True if a keyframe is due for so long that something must be wrong."""
    cut_off_at: VersionId | None
    """The newest version, if no path in the store leads to it; else None."""
    written: tuple[FoldedWrite, ...]
    collected: int
    """Objects that were deleted."""
    failures: tuple[CompactorFailure, ...]


def describe_overdue(
    last: CompactorReport | None, *, newest: int, first: int, versions: int, problem: str = ""
) -> str:
    """Explain why a keyframe is overdue; empty if none is.

    Args:
        last: report of the compactor; None before its first one.
        newest: number of the newest version that was published.
        first: number of the first one of this process.
        versions: between two keyframes, as the run has it.
        problem: error of the last round, if it gave no report.
    """
    if last is not None and last.chain.newest is not None:
        chain = last.chain.versions + max(0, newest - last.chain.newest.number)
    else:
        chain = newest - first
    if chain < OVERDUE * versions and not (last is not None and last.is_overdue):
        return ""
    failures = [f"{each.stage}: {each.message}" for each in last.failures] if last else []
    why = problem or "; ".join(failures) or "the compactor does not answer"
    done = f"{chain} versions were published since the last complete copy"
    return f"{done}, one is due every {versions}: {why}"


class CompactorClient(Protocol):
    """Client of a compactor."""

    async def run_round(self, epoch: int) -> CompactorReport:
        """Run one round of the compactor.

        Raises:
            FencedError: a newer epoch was opened.
        """
        ...
