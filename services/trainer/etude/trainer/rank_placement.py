"""Placement of learner ranks on the nodes of a Ray cluster."""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

import ray
from ray.util import placement_group, placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""Time between looks at a placement group that waits for nodes; a stop waits as long at most."""

REMIND_EVERY = 12
"""Looks between two warnings."""


class RankPlace(NamedTuple):
    """Place of one rank."""

    address: str
    """Of its node."""
    strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy


def bundle_size(*, ranks: int, group_size: int, gpus_per_node: int) -> int:
    """Number of ranks in one bundle, which Ray keeps on one node.

    A bundle is a whole shard group if as few nodes as have room for all ranks have room for whole
    groups; else the largest part of a group of which nodes can be full.

    Args:
        ranks: of all groups, with a GPU each.
        group_size: ranks that share one copy of the weights; divides ranks.
        gpus_per_node: GPUs of each node, at least 1.
    """
    nodes = -(-ranks // gpus_per_node)
    if nodes * (gpus_per_node // group_size) * group_size >= ranks:
        return group_size
    return math.gcd(group_size, gpus_per_node)


def order_bundles(nodes: Sequence[str], *, first: str) -> list[int]:
    """Order in which bundles get ranks: those of a node follow each other.

    Args:
        nodes: node of each bundle.
        first: node whose bundles come first, if it has any.

    Returns:
        Indices of the bundles.
    """
    return sorted(range(len(nodes)), key=lambda index: (nodes[index] != first, nodes[index], index))


async def place_ranks(*, ranks: int, group_size: int, gpus_per_node: int) -> list[RankPlace]:
    """Reserve a place for each rank; waits for nodes that are yet to join the cluster.

    Args:
        ranks: number of places.
        group_size: ranks that share one copy of the weights.
        gpus_per_node: GPUs of each node for ranks, one for each; 0 has all ranks on this node.

    Returns:
        The places in rank order: ranks of a node follow each other.
    """
    here: str = ray.get_runtime_context().get_node_id()
    if not gpus_per_node:
        strategy = NodeAffinitySchedulingStrategy(here, soft=False)
        return [RankPlace(ray.util.get_node_ip_address(), strategy)] * ranks
    size = bundle_size(ranks=ranks, group_size=group_size, gpus_per_node=gpus_per_node)
    group = placement_group([{"GPU": size}] * (ranks // size), strategy="PACK")
    looks = 0
    while not await asyncio.to_thread(group.wait, WAIT_S):
        if looks % REMIND_EVERY == 0:
            _warn_of_missing_gpus(ranks, size)
        looks += 1
    node_of: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    nodes = [node_of[index] for index in range(ranks // size)]
    order = order_bundles(nodes, first=here)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for place, index in enumerate(order):
        first, last = place * size, (place + 1) * size - 1
        log.info("learner ranks %d to %d run on %s", first, last, addresses[nodes[index]])
    return [
        RankPlace(
            addresses[nodes[index]],
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        for index in order
        for _ in range(size)
    ]


def _warn_of_missing_gpus(ranks: int, size: int) -> None:
    log.warning(
        "learner ranks wait for nodes: %d GPUs are needed, in parts of %d on one node; %d of the"
        " cluster's %d are free",
        ranks,
        size,
        ray.available_resources().get("GPU", 0),
        ray.cluster_resources().get("GPU", 0),
    )
