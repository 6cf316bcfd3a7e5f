"""Terminating hosts of a pool, and those that are stuck."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.operator.manifests import Manifest, is_deleting, uid
from etude.operator.pools.autoscaling.limits import GOING_S


@dataclass(slots=True)
class Going:
    """Terminating hosts of one pool, timed by the operator's own clock."""

    _since: dict[str, float] = field(default_factory=dict)
    """Time at which each was first observed as terminating, by uid."""

    def see(self, nodes: Sequence[Manifest], *, now_s: float) -> None:
        """Record the terminating hosts."""
        leaving = [uid(node) for node in nodes if is_deleting(node)]
        self._since = {name: self._since.get(name, now_s) for name in leaving}

    def stuck(self, nodes: Sequence[Manifest], *, now_s: float) -> set[str]:
        """Uids of hosts that terminate for too long: their node does not answer."""
        return {
            uid(node)
            for node in nodes
            if now_s - self._since.get(uid(node), now_s) > _grace_s(node) + GOING_S
        }


def _grace_s(node: Manifest) -> float:
    return float(node["metadata"].get("deletionGracePeriodSeconds") or 0)
