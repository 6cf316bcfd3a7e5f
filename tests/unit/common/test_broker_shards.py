"""Everybody finds the same broker for a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.broker_shards import (
    BrokerShard,
    broker_target,
    brokers_by_environment,
    parse_targets,
    shard_of,
)


@given(st.text(min_size=1), st.integers(1, 64))
def test_every_run_has_exactly_one_broker(run_id: str, count: int) -> None:
    assert [index for index in range(count) if BrokerShard(index, count).serves(run_id)] == [
        shard_of(run_id, count)
    ]


def test_the_broker_of_a_run_stays_what_it_was_in_other_versions() -> None:
    assert [shard_of(f"run-{n}", 4) for n in range(8)] == [2, 0, 2, 2, 1, 2, 0, 1]


def test_runs_spread_over_all_brokers() -> None:
    counts = [0] * 4
    for n in range(4_000):
        counts[shard_of(f"{n:032x}", 4)] += 1

    assert min(counts) > 900


def test_a_client_calls_the_broker_of_its_run() -> None:
    assert broker_target("any", "a:1") == "a:1"
    assert broker_target("run-4", "a:1, b:2, c:3, d:4") == "b:2"


@pytest.mark.parametrize("text", ["", "a:1,", ",".join(["a:1"] * 65)])
def test_a_list_of_brokers_with_a_gap_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_targets(text)


@pytest.mark.parametrize("text", ["1", "1/1", "-1/2", "0/0", "a/b", "0/65"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no index/count|needs index < count"):
        BrokerShard.parse(text)


@pytest.mark.parametrize("text", ["x", "[]", '{"a": 1}', '{"a": "b:1,"}'])
def test_brokers_that_cannot_be_read_are_refused_by_the_setting_s_name(text: str) -> None:
    with pytest.raises(ValueError, match="ETUDE_BROKERS"):
        brokers_by_environment(text)
