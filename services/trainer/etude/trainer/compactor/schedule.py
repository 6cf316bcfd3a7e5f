"""Schedule of compaction: when a keyframe is due, and which versions to visit. Pure."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from etude.common.weights.protocol.listing import Listing
from etude.common.weights.protocol.versions import VersionId

OVERDUE = 2
"""A keyframe is overdue once the chain is this many times as long as its limit."""


class KeyframeCadence(NamedTuple):
    """Limits of a chain of deltas."""

    versions: int
    """Between two complete copies."""
    ratio: float
    """Of the size of the last complete copy: deltas may add up to this share of it."""


class ChainState(NamedTuple):
    """The chain of deltas from the last complete copy to the newest version."""

    newest: VersionId | None
    anchor: VersionId | None
    """The last complete version: by a keyframe, or as it was published."""
    anchor_bytes: int
    versions: int
    """After the anchor."""
    num_bytes: int
    """Of their deltas."""


EMPTY = ChainState(None, None, 0, 0, 0)
"""Nothing is published."""


LEAST_SPACING = 8
"""Fewest versions between two keyframes: if deltas are nearly as large as keyframes, one per
version would double the stored bytes and shorten no path."""


def chain_anchor(chain: Sequence[VersionId], listing: Listing) -> VersionId | None:
    """The last version of a chain from which a replica without weights can start."""
    whole = listing.complete | {
        version for version, each in listing.keyframes.items() if each.record is not None
    }
    return next((version for version in reversed(chain) if version in whole), None)


def measure_chain(chain: Sequence[VersionId], listing: Listing) -> ChainState:
    """Measure the chain; the versions are accepted ones, oldest first."""
    if not chain:
        return EMPTY
    anchor = chain_anchor(chain, listing)
    since = chain if anchor is None else chain[chain.index(anchor) + 1 :]
    sizes = [info.size for each in since for info in listing.payloads.get(each, [])]
    whole = []
    if anchor is not None:
        keyframe = listing.keyframes.get(anchor)
        is_keyframe = keyframe is not None and keyframe.record is not None
        whole = keyframe.parts if keyframe and is_keyframe else listing.payloads[anchor]
    anchor_bytes = sum(info.size for info in whole)
    return ChainState(chain[-1], anchor, anchor_bytes, len(since), sum(sizes))


def is_keyframe_due(
    state: ChainState, cadence: KeyframeCadence, model_bytes: int, *, times: int = 1
) -> bool:
    """True if the chain has reached `times` its limit."""
    if not state.versions:
        return False
    whole_bytes = state.anchor_bytes if state.anchor is not None else model_bytes
    if state.versions >= times * cadence.versions:
        return True
    by_size = state.num_bytes >= times * cadence.ratio * whole_bytes
    return by_size and state.versions >= LEAST_SPACING


def versions_to_visit(
    chain: Sequence[VersionId], live: VersionId | None, *, most: int
) -> Sequence[VersionId]:
    """The versions to visit: each one, or only the newest if there are more than `most`.

    Args:
        chain: accepted versions, oldest first.
        live: version of the copy.
        most: limit of versions to visit one by one, for the skips between them.
    """
    if live is None or live not in chain:
        return chain[-1:]
    ahead = chain[chain.index(live) + 1 :]
    return ahead if len(ahead) <= most else ahead[-1:]


def strides_at(number: int, strides: Collection[int]) -> list[int]:
    """The strides whose folded deltas end and restart at a version of this number."""
    return [stride for stride in sorted(strides) if number % stride == 0]
