"""Provisioning times of a pool's hosts, as the operator observes them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.operator.manifests import Manifest, is_deleting, is_true, uid
from etude.operator.pools.autoscaling.provisioning import KEPT, PRIOR, Provision, provision

_OVER = {"Failed", "Succeeded"}


def _newest() -> deque[float | None]:
    return deque(maxlen=KEPT)


@dataclass(slots=True)
class Provisions:
    """Newest provisioning times of one pool."""

    prior: Provision = PRIOR
    """Assumed while samples are few: the figure of an earlier operator."""
    took_s: deque[float | None] = field(default_factory=_newest)
    """Of each new host; None for one that ended before it was ready."""
    _begun: dict[str, float] = field(default_factory=dict)
    """Time at which hosts that are not ready were first observed, by uid."""
    _settled: set[str] = field(default_factory=set)
    """Uids of hosts that were measured or cannot be."""

    def see(self, nodes: Sequence[Manifest], *, now_s: float) -> None:
        """Record the present hosts."""
        living = {uid(node) for node in nodes}
        self._begun = {name: at for name, at in self._begun.items() if name in living}
        self._settled &= living
        for node in nodes:
            if uid(node) not in self._settled:
                self._look(node, now_s)

    @property
    def found(self) -> Provision:
        """Quantiles of the observed times."""
        return provision(tuple(self.took_s), self.prior)

    def _look(self, node: Manifest, now_s: float) -> None:
        name = uid(node)
        is_ready, is_over = is_true(node, "Ready"), node.get("status", {}).get("phase") in _OVER
        if is_ready or is_over or is_deleting(node):
            begun_s = self._begun.pop(name, None)
            self._settled.add(name)
            # Hosts that an earlier operator created are observed too late to be timed.
            if begun_s is not None and is_over:
                self.took_s.append(None)
            elif begun_s is not None and is_ready:
                self.took_s.append(now_s - begun_s)
        else:
            self._begun.setdefault(name, now_s)
