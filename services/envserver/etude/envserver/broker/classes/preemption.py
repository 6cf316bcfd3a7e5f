"""Slots that classes of leases owe to others which wait below their floors. Pure."""

from collections import Counter
from collections.abc import Mapping

from etude.envserver.broker.classes.shares import ClassShares
from etude.v1 import environments_pb2

PREEMPTED_CLASSES = (
    environments_pb2.LEASE_CLASS_TRAINING,
    environments_pb2.LEASE_CLASS_EVALUATION,
)
"""Classes whose leases may be paused: rollouts wait for a model most of the time, people do not."""


def slots_owed(
    shares: ClassShares, held: Mapping[int, int], waiting: Mapping[int, int], *, brokers: int
) -> Counter[int]:
    """Slots that each class lacks to its floor, as far as something of it waits.

    Args:
        shares: floors and weights.
        held: slots of each class, ordered ones included.
        waiting: environments that wait, by class.
        brokers: number of brokers that share each floor.
    """
    owed = Counter[int]()
    for each, count in waiting.items():
        lacking = shares.floor(each, brokers) - held.get(each, 0)
        if (found := min(count, lacking)) > 0:
            owed[each] = found
    return owed


def choose_lenders(
    shares: ClassShares, held: Mapping[int, int], count: int, *, brokers: int
) -> Counter[int]:
    """Slots that each class gives up, one after another, of the class that is most above its floor.

    No class gives up a slot of its floor, so it may be fewer than asked for.

    Args:
        shares: floors and weights.
        held: slots of each class.
        count: slots that are wanted.
        brokers: number of brokers that share each floor.
    """
    above = {each: held.get(each, 0) - shares.floor(each, brokers) for each in PREEMPTED_CLASSES}
    lenders = Counter[int]()
    for _ in range(min(count, sum(max(0, each) for each in above.values()))):
        most = max(PREEMPTED_CLASSES, key=lambda each: (above[each] / shares.weight(each), -each))
        above[most] -= 1
        lenders[most] += 1
    return lenders
