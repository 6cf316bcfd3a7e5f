"""Which requests may share cached prefixes: those with the same salt."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from etude.common.weights import VersionId

PrefixCache = Literal["Salted", "Sticky", "Reset"]

MAX_EPISODES = 65_536
"""Episodes that are remembered, the newest ones: another turn of an older one begins anew."""


class Admission(NamedTuple):
    """How a request enters the engine."""

    oldest: VersionId
    """No cached entry that it can meet was computed with older weights."""
    salt: str
    """Empty shares with everybody."""


@dataclass(slots=True)
class Salts:
    """The salts of one engine."""

    mode: PrefixCache = "Salted"
    """Salted shares inside one version; Sticky lets an episode keep what it cached under older
    ones; Reset shares with all, and relies on the cache being dropped at each swap."""
    sticky_lag: int = 4
    """Versions after which an episode's cached prefixes are given up."""
    _first: "OrderedDict[str, VersionId]" = field(default_factory=OrderedDict)
    """Version whose salt an episode has."""

    def admit(self, live: VersionId, episode: str = "") -> Admission:
        """How a request of an episode enters now; an empty name belongs to none."""
        if self.mode == "Reset":
            return Admission(live, "")
        if self.mode == "Salted" or not episode:
            return Admission(live, str(live))
        first = self._first.get(episode, live)
        if not 0 <= live.number - first.number < self.sticky_lag:
            first = live
        self._first[episode] = first
        self._first.move_to_end(episode)
        while len(self._first) > MAX_EPISODES:
            self._first.popitem(last=False)
        return Admission(first, str(first))

    def forget(self) -> None:
        """The cache was dropped: nothing older than what is live is in it."""
        self._first.clear()
