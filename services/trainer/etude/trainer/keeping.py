"""When a keyframe is due, and over which versions a copy goes on; decides only."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from etude.common.weights.protocol.listing import Listing
from etude.common.weights.protocol.versions import VersionId

OVERDUE = 2
"""A keyframe is overdue once the chain is so many times as long as where one is due."""


class Cadence(NamedTuple):
    """How long a chain of deltas may become."""

    versions: int
    """Between two complete copies."""
    ratio: float
    """Of the size of the last complete copy: deltas may add up to this share of it."""


class ChainState(NamedTuple):
    """The chain of deltas from the last complete copy to the newest version."""

    newest: VersionId | None
    anchor: VersionId | None
    """The last version that is there as a whole: by a keyframe, or as it was published."""
    anchor_bytes: int
    versions: int
    """After the anchor."""
    num_bytes: int
    """Of their deltas."""


EMPTY = ChainState(None, None, 0, 0, 0)
"""Nothing is published."""


LEAST_SPACING = 8
"""Versions between two keyframes at least: where deltas are nearly as large as keyframes, one for
each version would double what is stored and shorten no way."""


def anchor_of(chain: Sequence[VersionId], listing: Listing) -> VersionId | None:
    """The last version of a chain at which a replica without weights can begin."""
    whole = listing.complete | {
        version for version, each in listing.keyframes.items() if each.record is not None
    }
    return next((version for version in reversed(chain) if version in whole), None)


def chain_state(chain: Sequence[VersionId], listing: Listing) -> ChainState:
    """How long the chain has become; the versions are accepted ones, oldest first."""
    if not chain:
        return EMPTY
    anchor = anchor_of(chain, listing)
    since = chain if anchor is None else chain[chain.index(anchor) + 1 :]
    sizes = [info.size for each in since for info in listing.payloads.get(each, [])]
    whole = []
    if anchor is not None:
        keyframe = listing.keyframes.get(anchor)
        is_keyframe = keyframe is not None and keyframe.record is not None
        whole = keyframe.parts if keyframe and is_keyframe else listing.payloads[anchor]
    anchor_bytes = sum(info.size for info in whole)
    return ChainState(chain[-1], anchor, anchor_bytes, len(since), sum(sizes))


def is_due(state: ChainState, cadence: Cadence, model_bytes: int, *, times: int = 1) -> bool:
    """Whether the chain is as long as it may be, or so many times as long.

    Args:
        state: of the chain.
        cadence: of the run.
        model_bytes: stands for the size of the last complete copy where there is none.
        times: OVERDUE asks whether the keyframe is overdue.
    """
    if not state.versions:
        return False
    whole_bytes = state.anchor_bytes if state.anchor is not None else model_bytes
    if state.versions >= times * cadence.versions:
        return True
    by_size = state.num_bytes >= times * cadence.ratio * whole_bytes
    return by_size and state.versions >= LEAST_SPACING


def route(chain: Sequence[VersionId], live: VersionId | None, *, most: int) -> Sequence[VersionId]:
    """The versions to go over: each one, or at once to the newest if there are more than most.

    Args:
        chain: accepted versions, oldest first.
        live: where the copy is.
        most: versions that are worth being seen one by one, for the skips between them.
    """
    if live is None or live not in chain:
        return chain[-1:]
    ahead = chain[chain.index(live) + 1 :]
    return ahead if len(ahead) <= most else ahead[-1:]


def strides_at(number: int, strides: Collection[int]) -> list[int]:
    """The strides whose folded deltas end, and begin anew, at a version of this number."""
    return [stride for stride in sorted(strides) if number % stride == 0]


class Written(NamedTuple):
    """A keyframe or a skip that is in the store now."""

    kind: str
    """keyframe or skip."""
    target: VersionId
    num_bytes: int
    seconds: float


class Failure(NamedTuple):
    """What did not work in a round, and is tried again in a later one."""

    stage: str
    message: str


class KeeperReport(NamedTuple):
    """What one round of the keeper did and found."""

    chain: ChainState
    is_overdue: bool
    """Whether a keyframe is due for so long that something must be wrong."""
    cut_off_at: VersionId | None
    """The newest version that the keeper saw, if nothing in the store leads it there; else None."""
    written: tuple[Written, ...]
    collected: int
    """Objects that were deleted."""
    failures: tuple[Failure, ...]


def overdue(
    last: KeeperReport | None, *, newest: int, first: int, versions: int, problem: str = ""
) -> str:
    """Why a keyframe is overdue, in a sentence; empty if none is.

    Args:
        last: report of the keeper; None before its first, or for ever if it does not come up.
        newest: number of the newest version that was published.
        first: number of the first one of this process.
        versions: between two keyframes, as the run has it.
        problem: why the keeper gave no report when it was last asked for one.
    """
    if last is not None and last.chain.newest is not None:
        chain = last.chain.versions + max(0, newest - last.chain.newest.number)
    else:
        chain = newest - first
    if chain < OVERDUE * versions and not (last is not None and last.is_overdue):
        return ""
    failures = [f"{each.stage}: {each.message}" for each in last.failures] if last else []
    why = problem or "; ".join(failures) or "the keeper does not answer"
    done = f"{chain} versions were published since the last complete copy"
    return f"{done}, one is due every {versions}: {why}"
