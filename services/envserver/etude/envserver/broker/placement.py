"""Placement of environments on hosts: power of a few choices, siblings of a group together."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import NamedTuple, Protocol

from etude.envserver.broker.hosts import Hosts, HostState
from etude.envserver.broker.launch_queue import LaunchBatch, Offer, Turn

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

    def __getitem__(self, place: int, /) -> HostState: ...


class PlacementRequest(NamedTuple):
    """Environments to place."""

    template: str
    siblings: int = 1
    """Environments of one group that should share a host."""
    is_now: bool = True
    """True if it is ordered now, from a host that is not busy with orders."""
    packs: bool = False
    """True to fill the oldest hosts first, so that the others become empty."""
    image: str = ""
    """Digest of the image that the task names by it."""


def expected_ms(host: HostState, template: str) -> float:
    """Time until an environment that is ordered now would be ready."""
    return host.queue_ms + host.cost(template).ready_ms


def best_host(hosts: Iterable[HostState], want: PlacementRequest) -> HostState | None:
    """The soonest of some hosts, of equals the one with most memory, then most free slots.

    A host where all siblings fit comes before one where they do not, and one that has the image
    before one that still pulls it. To pack, the first of hosts that are about as soon is the best.
    """

    def rank(host: HostState) -> tuple[float, ...]:
        fits = want.siblings == 1 or host.takes(want.template, want.siblings)
        is_late = want.image in host.pulled_images
        if want.packs:
            return (not fits, is_late, expected_ms(host, want.template) // PACKED_MS)
        return (
            not fits,
            is_late,
            expected_ms(host, want.template),
            -(host.memory_bytes or 0),
            -host.free,
        )

    return min((host for host in hosts if host.takes(want.template)), key=rank, default=None)


def choose_host(
    hosts: Drawable, want: PlacementRequest, random: Random, *, choices: int = CHOICES
) -> HostState | None:
    """The best of a few random hosts that can take the environment; None if no host can."""

    def takes(host: HostState, count: int) -> bool:
        return host.takes(want.template, count) and not (want.is_now and host.is_busy)

    def drawn(count: int) -> list[HostState]:
        if want.packs:
            return _first_eligible(hosts, lambda host: takes(host, count), PACKED)
        return _draw_eligible(hosts, lambda host: takes(host, count), random, choices)

    found = drawn(want.siblings)
    if not found and want.siblings > 1:
        found = drawn(1)
    return best_host(found, want)


def _first_eligible(
    hosts: Drawable, is_eligible: Callable[[HostState], bool], count: int
) -> list[HostState]:
    """The first eligible hosts in the order in which they joined."""
    eligible = (host for host in map(hosts.__getitem__, range(len(hosts))) if is_eligible(host))
    return list(islice(eligible, count))


def _draw_eligible(
    hosts: Drawable, is_eligible: Callable[[HostState], bool], random: Random, choices: int
) -> list[HostState]:
    """Draw different eligible hosts, all of them if there are no more."""
    size = len(hosts)
    found: dict[int, HostState] = {}
    if size > 2 * choices:
        # Most draws hit while the pool is not nearly full; past this a look at all is cheaper.
        for _ in range(3 * choices):
            # About 5 times as fast as randrange, and as even for a few thousand hosts.
            place = int(random.random() * size)
            if place not in found and is_eligible(hosts[place]):
                found[place] = hosts[place]
                if len(found) == choices:
                    return list(found.values())
    eligible = [host for host in map(hosts.__getitem__, range(size)) if is_eligible(host)]
    return eligible if len(eligible) <= choices else random.sample(eligible, choices)


MAX_GROUPS = 10_000
"""Groups whose host is remembered; the oldest are forgotten first."""


@dataclass(slots=True)
class GroupPlacer:
    """Places environments on the hosts of one pool."""

    hosts: Hosts
    packs: bool = False
    """True to let hosts become empty, for a pool that removes empty ones."""
    random: Random = field(default_factory=Random)  # noqa: S311 - nothing secret depends on it
    _group_hosts: OrderedDict[tuple[str, str], str] = field(default_factory=OrderedDict)
    """Hosts of groups by run and group."""

    def offer(self, batch: LaunchBatch) -> Offer | None:
        """An offer for the next environment of a batch; None if no host takes it now."""
        template, image = batch.placement_class.template, batch.placement_class.image
        if batch.placement_class.snapshot_id:
            holders = self.hosts.holders(batch.key.run_id, batch.placement_class.snapshot_id)
            host = best_host(
                (each for each in holders if not each.is_busy), PlacementRequest(template)
            )
        else:
            host = self._group_host(batch.key.run_id, batch.request.group_id)
            if host is None or not host.takes(template):
                siblings = len(batch.waiting) if batch.request.group_id else 1
                host = self._choice(PlacementRequest(template, siblings, image=image))
        if host is None or host.is_busy:  # a group waits for its own
            return None
        return Offer(host.node_id, host.cost(template).cpu_ms)

    def reserve(self, turn: Turn) -> HostState | None:
        """Reserve the offered host for a turn; None if that host is lost meanwhile."""
        host = self.hosts.get(turn.offer.node_id)
        if host is not None:
            host.reserve(turn.batch.placement_class.template)
            self._remember_group_host(turn.batch.key.run_id, turn.batch.request.group_id, host)
        return host

    def prepare(self, run_id: str, group_id: str, want: PlacementRequest) -> HostState | None:
        """Choose the host of a group that starts soon."""
        host = self._group_host(run_id, group_id)
        if host is None or not host.takes(want.template):
            host = self._choice(want._replace(is_now=False))
        if host is not None:
            self._remember_group_host(run_id, group_id, host)
        return host

    def _choice(self, want: PlacementRequest) -> HostState | None:
        if want.image:
            holders = self.hosts.image_holders(want.image)
            found = best_host((host for host in holders if not host.is_busy), want)
            if found is not None:
                return found
        return choose_host(self.hosts, want._replace(packs=self.packs), self.random)

    def _group_host(self, run_id: str, group_id: str) -> HostState | None:
        name = self._group_hosts.get((run_id, group_id)) if group_id else None
        return None if name is None else self.hosts.get(name)

    def _remember_group_host(self, run_id: str, group_id: str, host: HostState) -> None:
        if not group_id:
            return
        self._group_hosts[run_id, group_id] = host.node_id
        if len(self._group_hosts) > MAX_GROUPS:
            self._group_hosts.popitem(last=False)
