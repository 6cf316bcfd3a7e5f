"""The cheapest way along the chain, from sizes alone."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from etude.common.weights.protocol.versions import VersionId

Kind = Literal["complete", "delta", "skip", "keyframe"]


class Step(NamedTuple):
    """One way to reach a version."""

    kind: Kind
    base: VersionId | None
    """None: it can be applied to anything."""
    target: VersionId
    num_bytes: int


def cheapest(
    chain: Sequence[VersionId], steps: Iterable[Step], start: VersionId | None
) -> list[Step] | None:
    """Steps from the start, or from nothing, to the last version of the chain.

    Args:
        chain: versions, oldest first; the last one is where to.
        steps: each leads forward along the chain; others are passed over.
        start: where from, besides nothing; on the chain or None.

    Returns:
        The steps with the fewest bytes, of those the fewest steps; empty if the start is the
        target; None if no way leads there.
    """
    place = {version: index for index, version in enumerate(chain)}
    into: dict[VersionId, list[Step]] = {}
    for step in steps:
        forward = step.base is None or place.get(step.base, len(chain)) < place.get(step.target, -1)
        if forward and step.target in place:
            into.setdefault(step.target, []).append(step)
    best: dict[VersionId | None, tuple[int, int, Step | None]] = {None: (0, 0, None)}
    if start is not None:
        best[start] = (0, 0, None)
    for version in chain:
        for step in into.get(version, ()):
            before = best.get(step.base)
            if before is None:
                continue
            cost = (before[0] + step.num_bytes, before[1] + 1)
            if version not in best or cost < best[version][:2]:
                best[version] = (*cost, step)
    return _walk(best, chain[-1])


def _walk(
    best: dict[VersionId | None, tuple[int, int, Step | None]], target: VersionId
) -> list[Step] | None:
    if target not in best:
        return None
    steps: list[Step] = []
    step = best[target][2]
    while step is not None:
        steps.append(step)
        step = best[step.base][2]
    return steps[::-1]
