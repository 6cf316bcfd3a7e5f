"""A pool with several brokers: each has hosts of its own, and all serve every run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.environments.sharded_pool import ShardedPool

from etude.common.errors import InvalidFieldError, UnavailableError
from etude.common.rpc.broker_channel import dial_brokers
from etude.envserver.broker.host_client import HostCallError
from etude.envserver.broker.shards.peers import MOVE_S, Peer, Peers
from etude.envserver.broker.shards.router import ShardRouter, divide_plan, soonest
from etude.envserver.broker.shards.spills import choose_spills
from etude.v1 import broker_peers_pb2, environments_pb2, environments_pb2_grpc, plan_pb2

HOSTS = [f"host-{n}" for n in range(6)]
BROKERS = ["b-0", "b-1", "b-2"]


@pytest.fixture
async def sharded(tmp_path: Path, source: str) -> AsyncIterator[ShardedPool]:
    made = ShardedPool(tmp_path, source)
    for name in BROKERS:
        await made.add_broker(name)
    for name in HOSTS:
        await made.add_host(name)
    yield made
    await made.stop()


def lease_ids(outcomes: list[environments_pb2.LaunchBatchResponse]) -> set[str]:
    return {each.lease.lease_id for each in outcomes if each.HasField("lease")}


def held(sharded: ShardedPool) -> set[str]:
    return {
        each.lease.lease_id for host in sharded.hosts.values() for each in host.host.held_leases()
    }


async def test_each_host_belongs_to_one_broker(sharded: ShardedPool) -> None:
    owners = [sharded.owner(name) for name in HOSTS]
    assert all(len(each) == 1 for each in owners)
    assert len({each[0] for each in owners}) > 1


async def test_a_batch_has_the_slots_of_all_brokers_whichever_is_asked(
    sharded: ShardedPool,
) -> None:
    for asked, key in zip(BROKERS, "abc", strict=True):
        found = await sharded.launch(asked, key, 8)
        assert len(lease_ids(found)) == 8
    assert len(held(sharded)) == 24


async def test_leases_are_renewed_and_released_at_any_broker(sharded: ShardedPool) -> None:
    granted = lease_ids(await sharded.launch("b-0", "a", 12))
    for name in BROKERS:
        assert await sharded.renew(name, sorted(granted)) == []
        assert await sharded.renew(name, ["unknown-lease"]) == ["unknown-lease"]
    await sharded.stub("b-1").ReleaseLeases(
        environments_pb2.ReleaseLeasesRequest(lease_ids=granted)
    )
    await sharded.beat()
    assert held(sharded) == set()


async def test_the_same_request_at_another_broker_gives_the_same_leases(
    sharded: ShardedPool,
) -> None:
    first = await sharded.launch("b-0", "a", 12)
    again = await sharded.launch("b-2", "a", 12, is_repeated=True)
    assert lease_ids(again) == lease_ids(first)
    assert len(held(sharded)) == 12


@pytest.mark.parametrize("dead", BROKERS)
async def test_no_lease_is_lost_with_the_broker_that_granted_it(
    sharded: ShardedPool, dead: str
) -> None:
    granted = lease_ids(await sharded.launch("b-1", "a", 20))
    left = next(name for name in BROKERS if name != dead)

    await sharded.kill(dead)
    with contextlib.suppress(grpc.aio.AioRpcError):  # UNAVAILABLE is no answer
        assert await sharded.renew(left, sorted(granted)) == []
    sharded.bury(dead)
    with contextlib.suppress(grpc.aio.AioRpcError):
        assert await sharded.renew(left, sorted(granted)) == []
    await sharded.beat(count=4)
    sharded.bury(dead, later_s=60)

    assert all(len(sharded.owner(name)) == 1 for name in HOSTS)
    assert await sharded.renew(left, sorted(granted)) == []
    assert held(sharded) == granted


async def test_a_lease_is_found_although_its_host_moves_between_the_answers_of_two_brokers(
    sharded: ShardedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sharded.add_broker("b-3")
    await sharded.beat()
    granted = sorted(lease_ids(await sharded.launch("b-0", "a", 1)))
    host = next(name for name, each in sharded.hosts.items() if each.host.held_leases())
    (granter,) = sharded.owner(host)
    asked = next(name for name in sharded.shards if name != granter)
    others = [each.name for each in sharded.shards[asked].router.peers.living]
    first, second = (name for name in others if name != granter)
    await sharded.move(host, second)
    ask = ShardRouter._renew_there

    async def ask_and_move(
        router: ShardRouter, peer: Peer, forwarded: broker_peers_pb2.ForwardRenewalRequest
    ) -> set[str]:
        missing = await ask(router, peer, forwarded)
        if peer.name == first and sharded.owner(host) == [second]:
            await sharded.move(host, first)
        return missing

    monkeypatch.setattr(ShardRouter, "_renew_there", ask_and_move)
    assert await sharded.renew(asked, granted) == []
    assert sharded.owner(host) == [first]


async def test_a_broker_that_has_not_met_the_others_calls_no_lease_gone(
    sharded: ShardedPool,
) -> None:
    router = sharded.shards["b-0"].router
    await router.peers.stop()
    router.peers = Peers(name="b-0", addresses=router.peers.addresses, target=router.peers.target)
    with pytest.raises(UnavailableError, match="not met all others"):
        await router.renew(["unknown-lease"], 60)

    router.peers.started_s = -MOVE_S
    assert await router.renew(["unknown-lease"], 60) == ["unknown-lease"]


async def test_a_repeated_request_finds_the_leases_of_a_dead_broker(sharded: ShardedPool) -> None:
    first = await sharded.launch("b-1", "a", 20)
    await sharded.kill("b-1")
    await sharded.beat(count=4)
    sharded.bury("b-1", later_s=60)

    again = await sharded.launch("b-0", "a", 20, is_repeated=True)

    assert lease_ids(again) == lease_ids(first)
    assert held(sharded) == lease_ids(first)


async def test_hosts_and_their_leases_move_to_a_broker_that_joins(sharded: ShardedPool) -> None:
    granted = lease_ids(await sharded.launch("b-1", "a", 24))
    for number in range(3, 8):
        await sharded.add_broker(f"b-{number}")
    await sharded.beat(count=3)

    owners = {sharded.owner(name)[0] for name in HOSTS}
    assert owners - set(BROKERS)
    assert all(len(sharded.owner(name)) == 1 for name in HOSTS)
    assert await sharded.renew("b-7", sorted(granted)) == []
    lost = [shard.broker.ledger.lost_total for shard in sharded.shards.values()]
    assert sum(lost) == 0
    assert held(sharded) == granted


async def test_a_client_of_the_pool_goes_on_when_a_broker_dies(sharded: ShardedPool) -> None:
    channel = dial_brokers(",".join(each.target for each in sharded.shards.values()))
    stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
    await channel.list_shards()
    await sharded.kill("b-0")
    sharded.bury("b-0", later_s=60)
    await sharded.beat(count=3)

    served = 0
    for number in range(12):
        asked = sharded.request(f"k-{number}", 1)
        with contextlib.suppress(grpc.aio.AioRpcError):
            served += len([each async for each in stub.LaunchBatch(asked)])
        await asyncio.sleep(0)
    assert served >= 11, "the dead broker is asked once"
    await channel.close()


async def test_two_brokers_of_one_name_are_refused(sharded: ShardedPool) -> None:
    peers = sharded.shards["b-0"].router.peers
    load = broker_peers_pb2.ShardLoad()
    load.shard.name, load.shard.target = "b-0", "127.0.0.1:9"
    with pytest.raises(InvalidFieldError, match=r"'b-0' is the broker at .* 127.0.0.1:9 has it"):
        peers.record_load(load, now_s=0)
    with pytest.raises(InvalidFieldError, match=r"load\.shard: a broker needs a name"):
        peers.record_load(broker_peers_pb2.ShardLoad(), now_s=0)


@given(
    st.lists(st.integers(0, 40), max_size=20),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 60)),
)
def test_spills_fill_the_room_of_others_and_no_more(
    waiting: list[int], rooms: dict[str, int]
) -> None:
    found = choose_spills(waiting, rooms)
    for name, free in rooms.items():
        assert sum(each.size for each in found if each.peer == name) <= free
    assert all(each.size <= waiting[each.place] for each in found)
    if sum(rooms.values()):
        assert bool(found) == any(waiting)
    assert len({each.place for each in found}) == len(found)


def test_a_plan_is_divided_and_the_soonest_answer_counts() -> None:
    plan = plan_pb2.RolloutPlan(waves=[plan_pb2.Wave(template="python", count=10)])
    plan.images.add(template="python", image="one@sha256:1")
    parts = divide_plan(plan, BROKERS)
    assert [wave.count for part in parts.values() for wave in part.waves] == [4] * 3
    assert sum(len(part.images) for part in parts.values()) == 1
    told = [
        environments_pb2.TemplateReady(template="python", ready_by_unix_ms=at) for at in (9, 0, 5)
    ]
    assert soonest(told) == [told[1]]


async def test_an_order_for_another_host_at_this_address_is_refused(sharded: ShardedPool) -> None:
    request = environments_pb2.OpenEnvironmentsRequest(node_id="host-1")
    first = sharded.hosts["host-0"].host.endpoint
    with pytest.raises(HostCallError, match="this is host host-0, not host-1"):
        await sharded.nodes.open(first, request)
