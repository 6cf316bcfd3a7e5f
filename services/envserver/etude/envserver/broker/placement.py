"""Placement of environments on hosts: power of a few choices, siblings of a group together."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import NamedTuple, Protocol

from etude.envserver.broker.hosts import Members, NodeState
from etude.envserver.broker.launch_queue import Batch, Offer, Turn

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


MAX_GROUPS = 10_000
"""Groups whose host is remembered; the oldest are forgotten first."""


@dataclass(slots=True)
class Placer:
    """Places environments on the hosts of one pool."""

    nodes: Members
    packs: bool = False
    """True to let hosts become empty, for a pool that removes empty ones."""
    random: Random = field(default_factory=Random)  # noqa: S311 - nothing secret depends on it
    _homes: OrderedDict[tuple[str, str], str] = field(default_factory=OrderedDict)
    """Hosts of groups by run and group."""

    def offer(self, batch: Batch) -> Offer | None:
        """An offer for the next environment of a batch; None if no host takes it now."""
        template = batch.line.template
        if batch.line.snapshot_id:
            holders = self.nodes.holders(batch.key.run_id, batch.line.snapshot_id)
            node = best((each for each in holders if not each.is_busy), Want(template))
        else:
            node = self._home(batch.key.run_id, batch.request.group_id)
            if node is None or not node.takes(template):
                siblings = len(batch.waiting) if batch.request.group_id else 1
                node = self._choice(Want(template, siblings))
        if node is None or node.is_busy:  # a group waits for its own
            return None
        return Offer(node.node_id, node.cost(template).cpu_ms)

    def reserve(self, turn: Turn) -> NodeState | None:
        """Reserve the offered host for a turn; None if that host is lost meanwhile."""
        node = self.nodes.get(turn.offer.node_id)
        if node is not None:
            node.reserve(turn.batch.line.template)
            self._settle(turn.batch.key.run_id, turn.batch.request.group_id, node)
        return node

    def prepare(self, run_id: str, group_id: str, want: Want) -> NodeState | None:
        """Choose the host of a group that starts soon."""
        node = self._home(run_id, group_id)
        if node is None or not node.takes(want.template):
            node = self._choice(want._replace(is_now=False))
        if node is not None:
            self._settle(run_id, group_id, node)
        return node

    def _choice(self, want: Want) -> NodeState | None:
        return choice(self.nodes, want._replace(packs=self.packs), self.random)

    def _home(self, run_id: str, group_id: str) -> NodeState | None:
        name = self._homes.get((run_id, group_id)) if group_id else None
        return None if name is None else self.nodes.get(name)

    def _settle(self, run_id: str, group_id: str, node: NodeState) -> None:
        if not group_id:
            return
        self._homes[run_id, group_id] = node.node_id
        if len(self._homes) > MAX_GROUPS:
            self._homes.popitem(last=False)
