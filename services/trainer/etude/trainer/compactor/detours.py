"""Detours of a mirror around damaged objects in the store."""

from etude.common.blobs import MissingError
from etude.common.errors import CorruptError
from etude.common.weights.protocol.versions import VersionId
from etude.common.weights.replicas.mirror import Change, DamagedEdgeError, Mirror


def move_around_damage(
    mirror: Mirror,
    version: VersionId,
    damage: CorruptError | MissingError,
    *,
    on_change: Change,
) -> bool:
    """Move a copy to a version by steps that are not damaged.

    Args:
        mirror: becomes the version, or what the last sound step led to.
        version: an accepted one.
        damage: what the copy met on the cheapest way.
        on_change: as in Mirror.move_to().

    Returns:
        Whether there is a way; False if whatever leads there is damaged or gone.

    Raises:
        FencedError: the version is not on the accepted chain.
        StoreError: the store failed.
    """
    avoid = _keys(damage)
    while True:
        try:
            # Looks at the store anew: an object may have gone since the caller did.
            mirror.move_to(version, on_change, avoid=avoid)
        except (CorruptError, MissingError) as error:
            keys = _keys(error)
            if keys <= avoid:
                return False
            avoid |= keys
        else:
            return True


def _keys(damage: CorruptError | MissingError) -> set[str]:
    """The objects of the step that is damaged; none where no step is."""
    if isinstance(damage, DamagedEdgeError):
        return {item.key for item in damage.edge.objects}
    return set()
