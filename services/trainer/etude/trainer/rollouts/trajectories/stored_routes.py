"""Recorded experts of finished rollouts, written by their workers to the run's store."""

import asyncio
import logging

from blake3 import blake3

from etude.common.blobs import Store
from etude.common.errors import StoreError
from etude.common.routed_experts import ROUTES, ExpertIds, RouteRows
from etude.v1 import routes_pb2

log = logging.getLogger(__name__)

WRITE_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts to write an object; then its rollout goes on without."""
MAX_ROUTES_BYTES = 1 << 30
"""Of one link; a message of protobuf ends at 2 GiB."""
KEY_DIGITS = 16
"""Of the digest."""


async def store_routes(
    store: Store, routes: ExpertIds, *, group_id: str, link: str
) -> routes_pb2.RoutesReference | None:
    """Store the recorded experts of one link under a key of their content.

    Args:
        store: of the run.
        routes: of all tokens of the link. [T, M, k]
        group_id: of its rollout's group.
        link: name of the link within the group.

    Returns:
        The reference; None if the store stays away, or they are too large for an object.
    """
    if routes.nbytes > MAX_ROUTES_BYTES:
        log.warning("recorded experts of %s are %d bytes, too many", link, routes.nbytes)
        return None
    data, digest = await asyncio.to_thread(_encode, routes)
    key = f"{ROUTES}{group_id}/{link}.{digest[:KEY_DIGITS]}"
    for pause_s in (*WRITE_PAUSES_S, None):
        try:
            await asyncio.to_thread(store.put, key, data)
        except StoreError as error:
            log.warning("recorded experts of %s cannot be stored: %s", link, error)
        else:
            return routes_pb2.RoutesReference(key=key, digest=digest)
        if pause_s is not None:
            await asyncio.sleep(pause_s)
    return None


def _encode(routes: ExpertIds) -> tuple[bytes, str]:
    """Give the object of recorded experts, and its digest."""
    data = RouteRows(0, routes).message().SerializeToString()
    return data, blake3(data).hexdigest()
