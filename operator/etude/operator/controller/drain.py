"""Drain of pool hosts: brokers stop placing environments there, then empty hosts are deleted."""

import asyncio
import logging
from collections.abc import Set

from etude.operator.actions import DrainHosts
from etude.operator.kube.interface import Cluster
from etude.operator.manifests import Manifest
from etude.operator.remotes import clients as brokers
from etude.operator.remotes.clients import RemoteClient, RemoteError

DELETE_MARGIN_S = 3.0
"""A deletion may take effect this long after it was sent: the timeout of a write."""

log = logging.getLogger(__name__)


async def drain_hosts(
    cluster: Cluster, peers: RemoteClient, about: Manifest, action: DrainHosts
) -> None:
    """Delete the hosts that every broker reports empty; later passes retry the others.

    A broker's hold expires: a host that could not be deleted before stays, since it may hold
    environments again.
    """
    pool = about["metadata"]["name"]
    try:
        async with asyncio.timeout(brokers.HOLD_S - DELETE_MARGIN_S):
            empty = await _empty_hosts(cluster, peers, about, action)
            for key, known in action.hosts.items():
                if key.name in empty:
                    await cluster.delete(key, uid=known)
    except RemoteError as error:
        log.warning("pool %s: no host was drained: %s", pool, error)
    except TimeoutError:
        log.warning("pool %s: hosts stay, draining took longer than brokers hold them", pool)


async def _empty_hosts(
    cluster: Cluster, peers: RemoteClient, about: Manifest, action: DrainHosts
) -> Set[str]:
    namespace = about["metadata"].get("namespace", "default")
    named = [key.name for key in action.hosts]
    empty = set(named)
    for target in action.brokers:
        empty &= await peers.drain(cluster.address(namespace, target), named)
    return empty
