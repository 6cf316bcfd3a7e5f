"""Lag of a replica behind the newest version, and its limit for new requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from etude.common.weights import MAX_LAG, VersionId

REASON = "ReplicaLagging"

READY_LAG = 2
"""Largest lag at which a replica becomes ready; one that is ready stays so up to MAX_LAG.

The gap keeps a few slow versions from taking a replica out of rotation and back in.
"""


def is_near(lag: int, *, was_near: bool) -> bool:
    """True if a replica with this lag gets new requests."""
    return lag <= (MAX_LAG if was_near else READY_LAG)


def lag_versions(live: VersionId, wanted: VersionId, chain: Sequence[VersionId]) -> int:
    """Number of accepted versions between the live and the wanted one.

    Version numbers alone do not tell: they have gaps where a run was resumed.
    """
    return sum(live.number < each.number <= wanted.number for each in chain)


def may_lag(live: VersionId | None, wanted: VersionId) -> bool:
    """True if by the numbers alone a replica may lag too far to become ready."""
    return wanted.number - (0 if live is None else live.number) > READY_LAG


@dataclass(slots=True)
class VersionLag:
    """Known lag of a replica behind the version that it should serve.

    While the store does not answer, no newer version is known: the lag stays as it was.
    """

    is_near: bool = False
    _wanted: VersionId | None = None
    _chain: Sequence[VersionId] = ()

    def set_wanted(self, wanted: VersionId, chain: Sequence[VersionId]) -> None:
        """Set the wanted version, and the accepted chain if the numbers leave the lag open."""
        self._wanted, self._chain = wanted, chain

    def update_live(self, live: VersionId | None) -> None:
        """Update from the live version."""
        if live is not None and self._wanted is not None:
            self.is_near = is_near(
                lag_versions(live, self._wanted, self._chain), was_near=self.is_near
            )

    @property
    def message(self) -> str:
        """Reason for not being ready."""
        return f"too far behind version {self._wanted} for new requests"
