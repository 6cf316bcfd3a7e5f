"""How far a replica may be behind, and still get new requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from etude.common.weights import MAX_LAG, VersionId

REASON = "ReplicaLagging"

JOIN_LAG = 2
"""A replica that is not ready becomes so this near to the version that it should serve.

One that is ready stays so up to MAX_LAG: a few slow versions must not take it out and in again.
"""


def is_near(lag: int, *, was_near: bool) -> bool:
    """Whether a replica so many versions behind gets new requests."""
    return lag <= (MAX_LAG if was_near else JOIN_LAG)


def lag(live: VersionId, wanted: VersionId, chain: Sequence[VersionId]) -> int:
    """Versions that are still to be taken, by their places on the accepted chain.

    Not by their numbers: those leave gaps where a run was resumed.
    """
    return sum(live.number < each.number <= wanted.number for each in chain)


def may_lag(live: VersionId | None, wanted: VersionId) -> bool:
    """Whether numbers alone leave open that a replica is too far behind to become ready."""
    return wanted.number - (0 if live is None else live.number) > JOIN_LAG


@dataclass(slots=True)
class Distance:
    """How far a replica is from the version that it should serve, as far as it knows.

    While the store does not answer, nothing newer is known: one that was near stays so.
    """

    is_near: bool = False
    _wanted: VersionId | None = None
    _chain: Sequence[VersionId] = ()

    def aim(self, wanted: VersionId, chain: Sequence[VersionId]) -> None:
        """Where to, and the accepted chain if numbers alone do not say that it is near."""
        self._wanted, self._chain = wanted, chain

    def stand_at(self, live: VersionId | None) -> None:
        """What is served now."""
        if live is not None and self._wanted is not None:
            self.is_near = is_near(lag(live, self._wanted, self._chain), was_near=self.is_near)

    @property
    def message(self) -> str:
        """Why no new requests are to come."""
        return f"too far behind version {self._wanted} for new requests"
