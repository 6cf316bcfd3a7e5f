"""Nodes that are on their way out, as long as that takes in health."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.operator.manifests import Manifest, is_deleting, uid
from etude.operator.scaling.limits import GOING_S


@dataclass(slots=True)
class Going:
    """Those of one pool. By our own clock: the cluster's may be another."""

    _since: dict[str, float] = field(default_factory=dict)
    """When each was first seen to go, by uid."""

    def see(self, nodes: Sequence[Manifest], *, now_s: float) -> None:
        """Take note of what there is now."""
        leaving = [uid(node) for node in nodes if is_deleting(node)]
        self._since = {name: self._since.get(name, now_s) for name in leaving}

    def stuck(self, nodes: Sequence[Manifest], *, now_s: float) -> set[str]:
        """Uids of those whose machine does not answer: they may stay for ever, and serve nobody."""
        return {
            uid(node)
            for node in nodes
            if now_s - self._since.get(uid(node), now_s) > _grace_s(node) + GOING_S
        }


def _grace_s(node: Manifest) -> float:
    return float(node["metadata"].get("deletionGracePeriodSeconds") or 0)
