"""Which fault comes when: drawn once from the seed, by number of published versions."""

import random
from collections.abc import Collection
from typing import NamedTuple

REPLICAS = {"r0": 1, "r1": 2, "r2": 1}
"""Ranks of each; r2 is the one that is stopped for long."""

PER_THOUSAND = {
    "kill publisher": 20,
    "kill keeper": 20,
    "kill replica": 20,
    "kill rank": 20,
    "zombie publisher": 10,
    "zombie keeper": 5,
    "overtaken reader": 6,
    "late joiner": 6,
    "flip at rest": 6,
    "wrong delta": 5,
    "store stopped": 3,
    "rank fails in prepare": 36,
    "rank fails in commit": 36,
    "rank fails in undo": 3,
    "replica stopped for long": 1,
    "dense version": 2,
    "version without change": 1,
    "complete version": 2,
}
"""How often the conductor does what, in a run of 1,000 versions."""

RARE = {"overtaken reader", "late joiner", "wrong delta"}
"""Races that do not show a broken check each time."""

LEAST = {
    "kill publisher": 20,
    "kill keeper": 20,
    "kill replica": 20,
    "kill rank": 20,
    "torn upload": 30,
    "bit flip": 100,
    "old announce": 200,
    "lost reply": 50,
    "503 burst": 1,
    "store stopped": 3,
    "zombie publisher": 10,
    "roll-back": 5,
    "rank fails in prepare": 30,
    "rank fails in commit": 30,
    "rank fails in undo": 3,
}
"""Fewer than this in a run of 1,000 versions, and the run has not shown what it must."""

LONG = 500
"""Versions from which on a run is held to that."""

SPREAD = (0.04, 0.9)
"""Share of the run in which faults begin, so that the end shows the recovery."""


class Event(NamedTuple):
    """Something that the conductor does once so many versions were published."""

    at: int
    kind: str


def counts(versions: int) -> dict[str, int]:
    """How often each kind is done in a run; each at least once, what is rare to hit more often."""
    return {
        kind: max(2 if kind in RARE else 1, round(n * versions / 1000))
        for kind, n in PER_THOUSAND.items()
    }


def least(kind: str, versions: int) -> int:
    """How often a kind must have happened in a run; of short ones chance asks nothing."""
    return LEAST.get(kind, 0) * versions // 1000 if versions >= LONG else 0


def drawn(seed: int, versions: int, *, only: Collection[str] | None = None) -> list[Event]:
    """The events of a run, first to last; each kind, or only some, spread over the run."""
    chance = random.Random(seed)
    events = []
    for kind, count in counts(versions).items():
        if only is not None and kind not in only:
            continue
        first, last = (share * versions for share in SPREAD)
        if kind == "replica stopped for long":
            last = first + (last - first) / 2
        width = (last - first) / count
        events += [
            Event(int(first + (place + chance.random()) * width), kind) for place in range(count)
        ]
    return sorted(events)
