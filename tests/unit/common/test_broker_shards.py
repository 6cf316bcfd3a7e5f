"""All parts find the same broker for a host and for a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.common.pools.broker_shards import (
    batch_key,
    brokers_by_environment,
    choose_shard,
    granting_label,
    parse_targets,
    shard_label,
)
from etude.common.rpc.broker_addresses import BrokerAddresses, service_name

NAMES = st.lists(st.text("abc-0123", min_size=1), min_size=2, max_size=12, unique=True)


@given(st.text(), NAMES, st.randoms())
def test_the_order_in_which_brokers_are_known_does_not_matter(
    key: str, names: list[str], random: object
) -> None:
    shuffled = sorted(names, key=lambda name: (hash((name, id(random))), name))
    assert choose_shard(key, names) == choose_shard(key, shuffled)


@given(st.text(), NAMES)
def test_only_what_a_lost_broker_had_moves(key: str, names: list[str]) -> None:
    before = choose_shard(key, names)
    for lost in names:
        after = choose_shard(key, [name for name in names if name != lost])
        assert before in {after, lost}


def test_the_broker_of_a_host_stays_what_it_was_in_other_versions() -> None:
    names = [f"broker-{n}" for n in range(4)]
    found = [names.index(choose_shard(f"host-{n}", names)) for n in range(8)]
    assert found == [0, 3, 0, 3, 2, 1, 2, 1]


def test_hosts_spread_over_all_brokers() -> None:
    names = [f"broker-{n}" for n in range(4)]
    counts = dict.fromkeys(names, 0)
    for n in range(4_000):
        counts[choose_shard(f"{n:032x}", names)] += 1
    assert min(counts.values()) > 900


def test_without_a_broker_there_is_none_to_choose() -> None:
    with pytest.raises(ValueError, match="no broker"):
        choose_shard("host", [])


def test_batches_of_a_group_have_one_broker() -> None:
    assert batch_key("a", "group") == batch_key("b", "group")
    assert batch_key("a") != batch_key("b")


def test_batches_of_an_image_have_one_broker_wherever_the_image_is_pulled_from() -> None:
    assert batch_key("a", "g", "one/repo@sha256:1") == batch_key("b", "h", "other@sha256:1")


def test_a_lease_names_the_broker_that_granted_it() -> None:
    assert granting_label(f"0123-4-abcd-{shard_label('broker-1')}") == shard_label("broker-1")


async def test_addresses_are_dialled_as_they_are_and_names_are_resolved() -> None:
    assert await BrokerAddresses("127.0.0.1:1,x@10.0.0.1:2").targets() == (
        "127.0.0.1:1",
        "x@10.0.0.1:2",
    )
    assert await BrokerAddresses("localhost:7").targets() == ("localhost:7",)


async def test_a_name_that_cannot_be_resolved_yet_is_dialled_as_it_is() -> None:
    assert await BrokerAddresses("no-such-host.invalid:7").targets() == ("no-such-host.invalid:7",)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("pool-broker", "pool-broker"),
        ("pool-broker-0.pool-broker", "pool-broker"),
        ("pool-broker.lab.svc", "pool-broker.lab.svc"),
        ("pool-broker-0.pool-broker.lab.svc.cluster.local", "pool-broker.lab.svc"),
        ("localhost", ""),
        ("a.b.example.com", ""),
    ],
)
def test_the_certificate_of_a_broker_is_that_of_its_service(host: str, name: str) -> None:
    assert service_name(host) == name


@pytest.mark.parametrize("text", ["", "a:1,", ",".join(["a:1"] * 65)])
def test_a_list_of_brokers_with_a_gap_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_targets(text)


@pytest.mark.parametrize("text", ["x", "[]", '{"a": 1}', '{"a": "b:1,"}'])
def test_brokers_that_cannot_be_read_are_refused_by_the_setting_s_name(text: str) -> None:
    with pytest.raises(ValueError, match="ETUDE_BROKERS"):
        brokers_by_environment(text)
