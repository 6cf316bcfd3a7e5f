"""Placement that keeps the environments of a group on one host."""

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random

from etude.envserver.broker.members import Members, NodeState
from etude.envserver.broker.placement import Want, best, choice
from etude.envserver.broker.queue import Batch, Offer, Turn

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
