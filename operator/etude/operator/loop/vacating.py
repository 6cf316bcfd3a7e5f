"""Nodes of a pool go once all of its brokers have promised to give them nothing more."""

import asyncio
import logging
from collections.abc import Set

from etude.operator.actions import Vacate
from etude.operator.cluster.api import Cluster
from etude.operator.manifests import Manifest
from etude.operator.reports import peers as brokers
from etude.operator.reports.peers import PeerError, Peers

LATE_S = 3.0
"""A deletion that has been sent may take effect so much later: the time-out of a write."""

log = logging.getLogger(__name__)


async def vacate(cluster: Cluster, peers: Peers, about: Manifest, action: Vacate) -> None:
    """Delete the nodes that every broker calls empty; the others are asked for again soon.

    A broker's promise ends by itself: what could not be deleted by then stays, for it may hold
    something again.
    """
    pool = about["metadata"]["name"]
    try:
        async with asyncio.timeout(brokers.HOLD_S - LATE_S):
            empty = await _empty(cluster, peers, about, action)
            for key, known in action.nodes.items():
                if key.name in empty:
                    await cluster.delete(key, uid=known)
    except PeerError as error:
        log.warning("no node of %s goes: %s", pool, error)
    except TimeoutError:
        log.warning("nodes of %s stay: it took longer than brokers keep them empty", pool)


async def _empty(cluster: Cluster, peers: Peers, about: Manifest, action: Vacate) -> Set[str]:
    namespace = about["metadata"].get("namespace", "default")
    named = [key.name for key in action.nodes]
    empty = set(named)
    for target in action.brokers:
        empty &= await peers.drain(cluster.address(namespace, target), named)
    return empty
