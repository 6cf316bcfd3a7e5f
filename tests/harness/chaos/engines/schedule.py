"""Which fault comes when in a run with real engines, by number of published versions."""

from typing import NamedTuple

KILLS = {
    "kill between stage and commit": 0.14,
    "kill during a commit": 0.34,
    "kill after a commit": 0.54,
    "kill between two versions": 0.72,
}
"""Of e0, by share of the run."""
COMPARED = (0.3, 0.66)
"""Where answers are compared with those of a fresh engine; and at the end."""


class Event(NamedTuple):
    """Something to do once so many versions were published."""

    at: int
    kind: str


def events(versions: int, *, quick: bool) -> list[Event]:
    """The events of a run, first to last; a quick one has a kill, an outage and a late engine."""
    if quick:
        kinds = {"late engine": 0.3, "store stopped": 0.5, "kill during a commit": 0.6}
    else:
        kinds = {
            "late engine": 0.4,
            "roll-back": 0.46,
            "store stopped": 0.6,
            "flip at rest": 0.78,
            "kill publisher": 0.85,
            **KILLS,
        }
    found = [Event(int(share * versions), kind) for kind, share in kinds.items()]
    if not quick:
        found += [Event(int(share * versions), "compare") for share in COMPARED]
    return sorted(found)
