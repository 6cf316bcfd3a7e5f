"""What a broker knows of who holds which snapshot."""

from etude.envserver.broker.hosts import Hosts
from etude.v1 import environments_pb2


def told(node_id: str, *names: tuple[str, str, str]) -> environments_pb2.HeartbeatRequest:
    held = [
        environments_pb2.HeldSnapshot(run_id=run, snapshot_id=name, template=template)
        for run, name, template in names
    ]
    return environments_pb2.HeartbeatRequest(node_id=node_id, snapshots=held)


def names(members: Hosts, run_id: str, snapshot_id: str) -> list[str]:
    return [node.node_id for node in members.holders(run_id, snapshot_id)]


def test_two_runs_may_choose_the_same_id_on_one_host() -> None:
    members = Hosts()
    members.apply_heartbeat(told("n", ("one", "s", "python"), ("two", "s", "go")), now_s=0)

    assert members.template_of("one", "s") == "python"
    assert members.template_of("two", "s") == "go"
    assert names(members, "one", "s") == names(members, "two", "s") == ["n"]
    assert members.template_of("three", "s") is None

    members.apply_heartbeat(told("n", ("two", "s", "go")), now_s=1)
    assert members.template_of("one", "s") is None
    assert names(members, "two", "s") == ["n"]


def test_what_a_silent_host_held_is_nowhere() -> None:
    members = Hosts()
    for node_id in ("n", "m"):
        members.apply_heartbeat(told(node_id, ("one", "s", "python")), now_s=0)
    assert sorted(names(members, "one", "s")) == ["m", "n"]

    for node in list(members):
        members.remove(node)

    assert names(members, "one", "s") == []
    assert members.template_of("one", "s") is None
