"""Warm-pool targets of each host, from plans, from shortages and from announced groups."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from etude.common.plans.forecast import Supply, Wave, lead_s, peak
from etude.common.plans.registry import PlanRegistry
from etude.envserver import metrics
from etude.envserver.broker.hosts import CLONE_BYTES, HostState
from etude.envserver.broker.start_costs import TemplateReadiness
from etude.v1 import environments_pb2

EVERY_S = 1.0
AHEAD_S = 2.0
"""Heartbeats bring targets once a second, and their effect with the next one."""
LEAST_WATERMARK, MOST_PER_NODE = 2, 64
DOUBLE_EVERY_S = 1.0
"""A burst is one sign that too little was ready, not many."""
HALVE_AFTER_S = 60.0
PIN_S = 60.0
"""How long an announced group is expected."""
MAX_PINS = 10_000
DISTANT_MS = 60_000
"""Reported for a template that no host can start now."""


@dataclass(slots=True)
class Watermark:
    """Number of shells to keep ready for a template: doubled after a shortage, halved when idle."""

    size: int = 0
    _changed_s: float = -math.inf
    _used_s: float = -math.inf

    def record_shortage(self, most: int, *, now_s: float) -> None:
        """Record a start that found nothing ready."""
        self._used_s = now_s
        if now_s - self._changed_s >= DOUBLE_EVERY_S:
            self.size = min(most, max(LEAST_WATERMARK, 2 * self.size))
            self._changed_s = now_s

    def record_hit(self, *, now_s: float) -> None:
        """Record a start that found something ready."""
        self._used_s = now_s

    def decay(self, *, now_s: float) -> None:
        """Halve the size after a minute without starts."""
        if self.size and now_s - max(self._used_s, self._changed_s) >= HALVE_AFTER_S:
            self.size = self.size // 2 if self.size > LEAST_WATERMARK else 0
            self._changed_s = now_s


class GroupPin(NamedTuple):
    """An announced group."""

    template: str
    node_id: str
    until_s: float


@dataclass(slots=True)
class WarmTargets:
    """Warm-pool targets of a pool's hosts."""

    plans: PlanRegistry
    planned: int = 0
    """Peak that plans expect within the next minute."""
    _targets: dict[str, list[environments_pb2.WarmTarget]] = field(default_factory=dict)
    """By host, as decided last."""
    _decided_s: float = -math.inf
    _watermarks: dict[str, Watermark] = field(default_factory=dict)
    _pins: dict[tuple[str, str], GroupPin] = field(default_factory=dict)

    def record_launch(
        self, request: environments_pb2.LaunchBatchRequest, template: str, count: int
    ) -> None:
        """Compare a launch with its plan. Plans are about groups: other launches do not count."""
        if request.group_id:
            self.plans.record_arrival(request.run_id, template, count)
            self._pins.pop((request.run_id, request.group_id), None)

    def record_start(
        self, template: str, start: environments_pb2.Start, num_hosts: int, *, now_s: float
    ) -> None:
        """Update the watermark of a template by one start."""
        # Copies and deltas do not depend on what is kept ready.
        if start == environments_pb2.START_SPAWN:
            mark = self._watermarks.setdefault(template, Watermark())
            mark.record_shortage(MOST_PER_NODE * num_hosts, now_s=now_s)
        elif start in {environments_pb2.START_SHELL, environments_pb2.START_PAUSED_CLONE}:
            self._watermarks.setdefault(template, Watermark()).record_hit(now_s=now_s)

    def pin(
        self, request: environments_pb2.PrepareGroupRequest, host: HostState, *, now_s: float
    ) -> None:
        """Expect a group on a host."""
        pin = GroupPin(request.template, host.node_id, now_s + PIN_S)
        self._pins[request.run_id, request.group_id] = pin
        if len(self._pins) > MAX_PINS:
            del self._pins[next(iter(self._pins))]

    def targets_of(self, node_id: str) -> list[environments_pb2.WarmTarget]:
        return self._targets.get(node_id, [])

    def refresh(self, hosts: Iterable[HostState], *, now_s: float) -> None:
        """Recompute the targets once a second, as often as hosts ask."""
        if now_s - self._decided_s >= EVERY_S:
            self._decided_s = now_s
            self._targets = self.targets(hosts, now_s=now_s)
            self.planned = self.plans.peak(now_s=now_s)
            metrics.planned.set(self.planned)
            metrics.plan_error_ratio.set(self.plans.worst_ratio)

    def targets(
        self, hosts: Iterable[HostState], *, now_s: float
    ) -> dict[str, list[environments_pb2.WarmTarget]]:
        """Compute targets by host. Plans and groups ask for paused clones, shortages for shells."""
        for mark in self._watermarks.values():
            mark.decay(now_s=now_s)
        self._pins = {key: pin for key, pin in self._pins.items() if pin.until_s > now_s}
        waves, hosts = _own_waves(self.plans.waves(now_s=now_s)), list(hosts)
        found: dict[str, list[environments_pb2.WarmTarget]] = {}
        pinned = (pin.template for pin in self._pins.values())
        for template in sorted({*waves, *self._watermarks, *pinned}):
            for node_id, target in self._of(template, hosts, waves.get(template, []), now_s):
                found.setdefault(node_id, []).append(target)
        return found

    def _of(
        self, template: str, hosts: list[HostState], waves: list[Wave], now_s: float
    ) -> Iterator[tuple[str, environments_pb2.WarmTarget]]:
        open_hosts = [n for n in hosts if n.is_open and not n.readiness(template).quarantined]
        wanted = math.ceil(warm_target(waves, supply(open_hosts, template), now_s=now_s))
        clones = apportion(
            wanted, {n.node_id: _max_clones(n, n.readiness(template)) for n in open_hosts}
        )
        for pin in self._pins.values():
            if pin.template == template and pin.node_id in clones:
                clones[pin.node_id] = max(1, clones[pin.node_id])
        mark = self._watermarks.get(template)
        shells = apportion(mark.size if mark else 0, {n.node_id: n.free for n in open_hosts})
        for host in open_hosts:
            name = host.node_id
            if clones[name] or shells[name]:
                yield (
                    name,
                    environments_pb2.WarmTarget(
                        template=template, paused_clones=clones[name], shells=shells[name]
                    ),
                )


def _own_waves(waves: Mapping[str, list[Wave]]) -> dict[str, list[Wave]]:
    """Waves without the environments that start from images of tasks."""
    own = {
        template: [replace(w, count=w.count - w.with_image, with_image=0) for w in each]
        for template, each in waves.items()
    }
    return {template: [w for w in each if w.count] for template, each in own.items()}


def _max_clones(host: HostState, level: TemplateReadiness) -> int:
    """Most clones that a host may have ready, the present ones included."""
    if host.memory_bytes is None:
        return host.free
    return min(host.free, level.paused_clones + max(0, host.memory_bytes) // CLONE_BYTES)


def supply(hosts: Iterable[HostState], template: str) -> Supply:
    """Speed at which some hosts make environments of a template ready."""
    slowest_ms, ready, per_second = 0.0, 0, 0.0
    for host in hosts:
        level = host.readiness(template)
        # The supply is about starts for which nothing is ready.
        bare = replace(level, paused_clones=0, shells=0)
        slowest_ms = max(slowest_ms, bare.cost.ready_ms, level.slow_ms)
        ready += level.paused_clones
        per_second += 1000 / max(1.0, level.spawn_cpu_ms)
    return Supply(slowest_ms / 1000, ready, per_second)


def warm_target(waves: list[Wave], supplied: Supply, *, now_s: float) -> float:
    """Environments to have ready: the peak of demand before more could be made.

    Waves are in the future, so running leases are not in them; each start takes one that is ready,
    whatever ends meanwhile.
    """
    soon = peak(waves, now_s, supplied.start_s + AHEAD_S)
    return peak(waves, now_s, lead_s(soon - supplied.ready, supplied) + AHEAD_S)


def apportion(total: int, room: dict[str, int]) -> dict[str, int]:
    """Split a total in proportion to the room of each host, no part larger than its room.

    Largest remainders first, then by name, so that the same question has the same answer.
    """
    size = sum(room.values())
    total = min(total, size)
    if not total:
        return dict.fromkeys(room, 0)
    parts = {name: total * each // size for name, each in room.items()}
    order = sorted(room, key=lambda name: (-(total * room[name] % size), name))
    for name in order[: total - sum(parts.values())]:
        parts[name] += 1
    return parts


def ready_by(
    hosts: Iterable[HostState], templates: Iterable[str], *, now_unix_ms: int
) -> list[environments_pb2.TemplateReady]:
    """Earliest time of one more environment of each template."""
    hosts, found = list(hosts), []
    for template in templates:
        waits = [
            host.queue_ms + host.cost(template).ready_ms for host in hosts if host.takes(template)
        ]
        least = min(waits, default=DISTANT_MS)
        at = 0 if least <= 1000 * AHEAD_S else now_unix_ms + round(least)
        found.append(environments_pb2.TemplateReady(template=template, ready_by_unix_ms=at))
    return found
