"""Order of lease classes for a free slot: floors first, then slot-seconds by weight."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.demand import WINDOW_S
from etude.v1 import environments_pb2

AHEAD_S = 30.0
"""Time for which a lease is expected to hold its slot: a burst is shared before any time passes."""


class ClassRule(NamedTuple):
    """Share of one class."""

    weight: float = 1.0
    floor: int = 0
    """Slots that it has before other classes get more."""
    headroom_s: float = WINDOW_S
    """Time for which its demand keeps slots of the floor free; 0 keeps none."""


DEFAULT_RULE = ClassRule()


def lease_class(number: int) -> int:
    """The class of a launch or a lease; unspecified ones train."""
    return number or environments_pb2.LEASE_CLASS_TRAINING


@dataclass(slots=True)
class ClassShares:
    """Slot-seconds that each class has used, in proportion to its weight.

    Source: Goyal, Vin and Cheng, https://doi.org/10.1109/90.649569.
    """

    rules: Mapping[int, ClassRule] = field(default_factory=dict)
    """By class; others have weight 1 and no floor."""
    used: dict[int, float] = field(default_factory=dict)
    """Slot-seconds by weight, less those of the class that has used least."""

    def record_use(
        self, held: Mapping[int, int], waiting: Collection[int], *, passed_s: float
    ) -> None:
        """Count the slots that classes have held for some time.

        A class that neither holds nor waits saves nothing up.
        """
        active = {each for each, count in held.items() if count} | set(waiting)
        used = {each: self.used.get(each, 0.0) for each in active}
        for each in active:
            used[each] += held.get(each, 0) * passed_s / self._rule(each).weight
        least = min(used.values(), default=0.0)
        self.used = {each: seconds - least for each, seconds in used.items()}

    def choose(self, waiting: Collection[int], held: Mapping[int, int], *, brokers: int = 1) -> int:
        """The class that gets the next slot.

        Args:
            waiting: classes with environments that could start.
            held: slots of each class, ordered ones included.
            brokers: number of brokers that share each floor.
        """
        below = [each for each in waiting if self.is_below_floor(each, held, brokers=brokers)]
        if below:
            return min(
                below, key=lambda each: (held.get(each, 0) / self.floor(each, brokers), each)
            )
        return min(waiting, key=lambda each: (self._expected(each, held), each))

    def _expected(self, each: int, held: Mapping[int, int]) -> float:
        """Use of a class after its leases have held their slots for a while, with one more."""
        ahead = (held.get(each, 0) + 1) * AHEAD_S / self._rule(each).weight
        return self.used.get(each, 0.0) + ahead

    def is_below_floor(self, each: int, held: Mapping[int, int], *, brokers: int = 1) -> bool:
        """True while a class has fewer slots than its floor."""
        return held.get(each, 0) < self.floor(each, brokers)

    def weight(self, each: int) -> float:
        """Weight of a class."""
        return self._rule(each).weight

    def floor(self, each: int, brokers: int) -> int:
        """Slots of a class before others get more, at each of several brokers."""
        return -(-self._rule(each).floor // brokers)

    def _rule(self, each: int) -> ClassRule:
        return self.rules.get(each, DEFAULT_RULE)
