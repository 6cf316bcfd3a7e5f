"""Placement of environments on hosts: power of a few choices, siblings of a group together."""

from collections.abc import Callable, Iterable
from itertools import islice
from random import Random
from typing import NamedTuple, Protocol

from etude.envserver.broker.members import NodeState

CHOICES = 4
"""Two random choices already avoid the fullest hosts; four find warm ones more often.

Source: Mitzenmacher, https://doi.org/10.1109/71.963420.
"""

PACKED = 2
"""Of the first hosts with room the sooner one: one alone would get all of a burst's orders."""
PACKED_MS = 250.0
"""The first host is taken unless the second is sooner by about this much."""


class Drawable(Protocol):
    """Hosts to draw from."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> NodeState: ...


class Want(NamedTuple):
    """Environments to place."""

    template: str
    siblings: int = 1
    """Environments of one group that should share a host."""
    is_now: bool = True
    """True if it is ordered now, from a host that is not busy with orders."""
    packs: bool = False
    """True to fill the oldest hosts first, so that the others become empty."""


def expected_ms(node: NodeState, template: str) -> float:
    """Time until an environment that is ordered now would be ready."""
    return node.queue_ms + node.cost(template).ready_ms


def best(nodes: Iterable[NodeState], want: Want) -> NodeState | None:
    """The soonest of some hosts, of equals the one with most memory, then most free slots.

    A host where all siblings fit comes before one where they do not. To pack, the first of hosts
    that are about as soon is the best.
    """

    def rank(node: NodeState) -> tuple[float, ...]:
        fits = want.siblings == 1 or node.takes(want.template, want.siblings)
        if want.packs:
            return (not fits, expected_ms(node, want.template) // PACKED_MS)
        return (
            not fits,
            expected_ms(node, want.template),
            -(node.memory_bytes or 0),
            -node.free,
        )

    return min((node for node in nodes if node.takes(want.template)), key=rank, default=None)


def choice(
    nodes: Drawable, want: Want, random: Random, *, choices: int = CHOICES
) -> NodeState | None:
    """The best of a few random hosts that can take the environment; None if no host can."""

    def takes(node: NodeState, count: int) -> bool:
        return node.takes(want.template, count) and not (want.is_now and node.is_busy)

    def drawn(count: int) -> list[NodeState]:
        if want.packs:
            return _first(nodes, lambda node: takes(node, count), PACKED)
        return _drawn(nodes, lambda node: takes(node, count), random, choices)

    found = drawn(want.siblings)
    if not found and want.siblings > 1:
        found = drawn(1)
    return best(found, want)


def _first(
    nodes: Drawable, is_eligible: Callable[[NodeState], bool], count: int
) -> list[NodeState]:
    """The first eligible hosts in the order in which they joined."""
    eligible = (node for node in map(nodes.__getitem__, range(len(nodes))) if is_eligible(node))
    return list(islice(eligible, count))


def _drawn(
    nodes: Drawable, is_eligible: Callable[[NodeState], bool], random: Random, choices: int
) -> list[NodeState]:
    """Draw different eligible hosts, all of them if there are no more."""
    size = len(nodes)
    found: dict[int, NodeState] = {}
    if size > 2 * choices:
        # Most draws hit while the pool is not nearly full; past this a look at all is cheaper.
        for _ in range(3 * choices):
            # About 5 times as fast as randrange, and as even for a few thousand nodes.
            place = int(random.random() * size)
            if place not in found and is_eligible(nodes[place]):
                found[place] = nodes[place]
                if len(found) == choices:
                    return list(found.values())
    eligible = [node for node in map(nodes.__getitem__, range(size)) if is_eligible(node)]
    return eligible if len(eligible) <= choices else random.sample(eligible, choices)
