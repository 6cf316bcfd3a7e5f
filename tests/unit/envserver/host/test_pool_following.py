"""Hosts that follow their pool's spec, and the turns in which they start again."""

import json
from typing import Any

import pytest

from etude.common.errors import InvalidFieldError, UserError
from etude.common.pools.pool_description import PoolDescription, parse_description
from etude.envserver.broker.broker import Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.pool_updates import HostProblems, PoolUpdates, hosts_in_turn
from etude.envserver.host.pool_following import asks_for_restart


def described(uid: str = "u", **spec: Any) -> PoolDescription:
    whole = {
        "templates": [{"name": "python", "trust": "Trusted"}],
        "isolation": {"minimum": "Process"},
        **spec,
    }
    return parse_description(json.dumps({"name": "p", "uid": uid, "spec": whole}), "here")


def allowing(*hosts: str) -> dict[str, Any]:
    rules = [{"name": f"r{number}", "host": host} for number, host in enumerate(hosts)]
    return {"egress": "Custom", "rules": rules}


@pytest.mark.parametrize(
    ("old", "new", "restarts"),
    [
        ({}, {"lease": {"ttlSeconds": 90}}, False),
        ({}, {"slotsPerReplica": 8}, True),
        ({}, {"templates": [{"name": "other", "trust": "Trusted"}]}, True),
        ({"network": allowing("a.org", "b.org")}, {"network": allowing("a.org")}, False),
        ({"network": allowing("a.org")}, {"network": {"egress": "None"}}, False),
        ({}, {"network": allowing("a.org")}, True),
    ],
)
def test_only_what_shapes_environments_asks_for_another_start(
    *, old: dict[str, Any], new: dict[str, Any], restarts: bool
) -> None:
    assert asks_for_restart(described(**old).pool.spec, described(**new).pool.spec) is restarts


def test_a_revision_names_the_text_and_not_its_order() -> None:
    spec = {"templates": [{"name": "a"}], "slotsPerReplica": 2}
    turned = dict(reversed(spec.items()))
    one, two = (
        parse_description(json.dumps({"uid": "u", "name": "p", "spec": each}), "here")
        for each in (spec, turned)
    )
    assert one.revision == two.revision != described().revision


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"name": 1}', " " * (2 << 20)])
def test_what_is_no_pool_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="here"):
        parse_description(text, "here")


def updates() -> PoolUpdates:
    first = described()
    return PoolUpdates(Broker(first.pool.spec, MemoryHostClient()), first)


def test_a_broker_serves_by_the_newer_spec() -> None:
    made = updates()
    newer = described(slotsPerReplica=7)

    assert made.replace(newer.text) == newer.revision

    assert made.broker.spec.slots_per_replica == 7


def test_a_broker_refuses_the_spec_of_another_pool() -> None:
    made = updates()
    with pytest.raises(InvalidFieldError, match="of pool other"):
        made.replace(described(uid="other").text)
    assert made.current.pool.uid == "u"


def test_one_host_in_ten_drains_at_a_time_and_at_least_one() -> None:
    names = [f"n{number:02}" for number in range(30)]
    assert hosts_in_turn(names, count=30) == {"n00", "n01", "n02"}
    assert hosts_in_turn(names[7:8], count=30) == {"n07"}
    assert hosts_in_turn(["b", "a"], count=2) == {"a"}


def test_a_problem_of_a_host_is_known_until_it_is_silent_or_well() -> None:
    problems = HostProblems()
    problems.record("a", "no /dev/kvm", now_s=0.0)
    problems.record("b", "runsc is not installed", now_s=1.0)
    assert problems.current(now_s=2.0) == {"a": "no /dev/kvm", "b": "runsc is not installed"}
    problems.record("b", "", now_s=3.0)
    assert problems.current(now_s=4.0) == {"a": "no /dev/kvm"}
    assert problems.current(now_s=40.0) == {}
