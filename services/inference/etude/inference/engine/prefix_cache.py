"""Prefix cache: cache salts that decide which requests share cached prefixes."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from etude.common.weights import VersionId
from etude.inference.settings import PrefixCache

MAX_ROLLOUTS = 65_536
"""Rollouts whose salt is kept, newest first; a turn of an older one starts a new salt."""


class CacheAdmission(NamedTuple):
    """Cache salt of a request, and the oldest weights behind it."""

    oldest: VersionId
    """No cached entry that the request can hit was computed with older weights."""
    salt: str
    """Empty: shared by all requests."""


@dataclass(slots=True)
class PrefixCacheSalts:
    """Cache salts of one engine."""

    mode: PrefixCache = "Salted"
    """Salted: shared within one version. Sticky: a rollout keeps what it cached under older ones.
    Reset: shared by all, and the cache is dropped at each swap."""
    sticky_lag: int = 4
    """Versions after which a rollout's cached prefixes are dropped."""
    _first_version: "OrderedDict[str, VersionId]" = field(default_factory=OrderedDict)
    """Version whose salt each rollout has."""

    def admit(self, live: VersionId, rollout: str = "") -> CacheAdmission:
        """Salt of a request of a rollout that enters now; an empty name is no rollout."""
        if self.mode == "Reset":
            return CacheAdmission(live, "")
        if self.mode == "Salted" or not rollout:
            return CacheAdmission(live, str(live))
        first = self._first_version.get(rollout, live)
        if not 0 <= live.number - first.number < self.sticky_lag:
            first = live
        self._first_version[rollout] = first
        self._first_version.move_to_end(rollout)
        while len(self._first_version) > MAX_ROLLOUTS:
            self._first_version.popitem(last=False)
        return CacheAdmission(first, str(first))

    def clear(self) -> None:
        """Forget all salts, after the cache was dropped."""
        self._first_version.clear()
