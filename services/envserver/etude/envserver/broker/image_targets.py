"""Images that each host of a pool pulls ahead, because plans of runs expect them."""

import math
from dataclasses import dataclass, field

from etude.common.plans.registry import PlannedImage, PlanRegistry
from etude.envserver.broker.hosts import Hosts, HostState
from etude.v1 import plan_pb2

EVERY_S = 1.0
"""As often as hosts ask."""
MAX_PER_HOST = 64
"""Images in one answer: a host pulls two at once, and asks every second."""


@dataclass(slots=True)
class ImageTargets:
    """Hosts of the images that plans expect: one for each, where its groups are placed later."""

    plans: PlanRegistry
    hosts: Hosts
    _homes: dict[str, str] = field(default_factory=dict)
    """Host by digest, of the images that are expected now."""
    _targets: dict[str, list[plan_pb2.PlannedImage]] = field(default_factory=dict)
    """By host, the soonest first."""
    _decided_s: float = -math.inf

    def targets_of(self, node_id: str) -> list[plan_pb2.PlannedImage]:
        return self._targets.get(node_id, [])

    def refresh(self, *, now_s: float) -> None:
        """Recompute the targets once a second."""
        if now_s - self._decided_s < EVERY_S:
            return
        self._decided_s = now_s
        self._targets, before, self._homes = {}, self._homes, {}
        for image in self.plans.images(now_s=now_s):
            digest = image.reference.rpartition("@")[2]
            host = self._home(image, digest, self.hosts.get(before.get(digest, "")))
            if host is None:
                continue
            self._homes[digest] = host.node_id
            targets = self._targets.setdefault(host.node_id, [])
            if len(targets) < MAX_PER_HOST:
                targets.append(
                    plan_pb2.PlannedImage(template=image.template, image=image.reference)
                )

    def _home(self, image: PlannedImage, digest: str, last: HostState | None) -> HostState | None:
        """A host that has the image, otherwise the last choice, otherwise one by the digest."""
        for host in self.hosts.image_holders(digest):
            if _is_eligible(host, image):
                return host
        if last is not None and _is_eligible(last, image):
            return last
        size = len(self.hosts)
        first = int(digest.rpartition(":")[2][:8], 16)
        ring = (self.hosts[(first + step) % size] for step in range(size))
        return next((host for host in ring if _is_eligible(host, image)), None)


def _is_eligible(host: HostState, image: PlannedImage) -> bool:
    return host.is_open and not host.readiness(image.template).quarantined
