"""Bundles of learner ranks, and the order in which they get ranks."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from etude.trainer.rank_placement import bundle_size, order_bundles


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 16))
def test_bundles_fit_on_as_few_nodes_as_have_room_for_the_ranks(
    group_size: int, groups: int, gpus_per_node: int
) -> None:
    ranks = group_size * groups
    size = bundle_size(ranks=ranks, group_size=group_size, gpus_per_node=gpus_per_node)
    assert group_size % size == 0, "no bundle has ranks of two groups"
    nodes = -(-ranks // gpus_per_node)
    assert nodes * (gpus_per_node // size) >= ranks // size
    can_be_whole = nodes * (gpus_per_node // group_size) >= groups
    assert (size == group_size) >= can_be_whole


def test_a_group_stays_on_one_node_where_all_can_and_is_cut_at_nodes_otherwise() -> None:
    def size(ranks: int, group_size: int) -> int:
        return bundle_size(ranks=ranks, group_size=group_size, gpus_per_node=8)

    assert size(16, 4) == 4
    assert size(12, 6) == 6, "two nodes have room for one group each"
    assert size(24, 6) == 2, "three nodes have no room for four whole groups"
    assert size(16, 16) == 8
    assert size(9, 9) == 1


@given(st.lists(st.sampled_from("abcd")), st.sampled_from("abcde"))
def test_ranks_of_a_node_follow_each_other_and_the_controllers_come_first(
    nodes: list[str], first: str
) -> None:
    order = order_bundles(nodes, first=first)
    assert sorted(order) == list(range(len(nodes)))
    runs = [node for node, _ in itertools.groupby(nodes[index] for index in order)]
    assert len(runs) == len(set(runs))
    assert first not in nodes or runs[0] == first
