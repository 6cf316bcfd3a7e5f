"""How leases are granted, found again, and taken back."""

import asyncio
import time
from collections.abc import Sequence

import pytest
from tests.support.environments.brokers import Response, ids, launched, pool, request, some, started
from typing_extensions import override

from etude.common.errors import FullError, InvalidFieldError, ReusedIdError
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import MemoryHostClient
from etude.envserver.broker.lease_ledger import LOST_AFTER_S
from etude.envserver.broker.pool_report import make_report
from etude.v1 import environments_pb2


async def test_a_batch_is_one_order_and_every_environment_has_its_own_lease() -> None:
    nodes = MemoryHostClient()
    outcomes = await launched(started(nodes), request(count=8))

    assert nodes.orders == 1
    assert sorted(o.index for o in outcomes) == list(range(8))
    assert len(set(ids(outcomes))) == 8
    tokens = {t for o in outcomes for t in (o.lease.agent_token, o.lease.control_token)}
    assert len(tokens) == 16


async def test_a_batch_is_spread_over_the_hosts() -> None:
    nodes = MemoryHostClient()
    outcomes = await launched(started(nodes, "n1", "n2", spec=pool(2)), request(count=8))

    endpoints = [o.lease.endpoint for o in outcomes]
    assert endpoints.count("n1") == endpoints.count("n2") == 4


class NodesWithADoor(MemoryHostClient):
    """Nodes that open nothing before they are let."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots)
        self.door = asyncio.Event()

    @override
    async def open(
        self, endpoint: str, request: environments_pb2.OpenEnvironmentsRequest
    ) -> Sequence[Response]:
        await self.door.wait()
        return await super().open(endpoint, request)


async def test_who_comes_first_does_not_get_every_slot_before_others_are_heard() -> None:
    nodes = NodesWithADoor(slots=64)
    broker = started(nodes)
    first = asyncio.create_task(launched(broker, request("first", count=64, run_id="one")))
    await asyncio.sleep(0)
    second = asyncio.create_task(launched(broker, request("second", count=16, run_id="two")))
    await asyncio.sleep(0)
    nodes.door.set()
    shared = await second
    assert not first.done()
    await broker.release(ids(shared))
    assert len(await first) == 64


async def test_a_group_waits_for_its_host_while_that_is_busy_with_orders() -> None:
    nodes = NodesWithADoor(slots=128)
    broker = started(nodes, "n1", "n2", spec=pool(2))
    nodes.door.set()
    outcomes = await launched(broker, request(count=64, group_id="g"))
    assert len({outcome.lease.endpoint for outcome in outcomes}) == 1


async def test_the_same_request_again_gets_the_same_leases() -> None:
    nodes = MemoryHostClient()
    broker = started(nodes)

    first = await launched(broker, request(count=3))
    again = await launched(broker, request(count=3))

    assert ids(first) == ids(again)
    assert first[0].lease.agent_token == again[0].lease.agent_token
    assert len(nodes.held["n1"]) == 3


async def test_two_clients_with_the_same_request_share_its_leases() -> None:
    nodes = MemoryHostClient(slots=2)
    broker = started(nodes)

    one, other = await asyncio.gather(*(launched(broker, request(count=2)) for _ in range(2)))

    assert ids(one) == ids(other)


async def test_a_key_that_comes_with_another_request_is_refused() -> None:
    broker = started(MemoryHostClient())
    await launched(broker, request(count=2))

    with pytest.raises(ReusedIdError):
        await launched(broker, request(count=3))


async def test_a_client_that_comes_back_gets_what_it_had_and_the_rest() -> None:
    nodes = MemoryHostClient(slots=2)
    broker = started(nodes)
    first = await some(broker, request(count=3), 2)
    assert len(broker.queue) == 0

    again = asyncio.create_task(launched(broker, request(count=3)))
    await asyncio.sleep(0)
    await broker.release([first[0].lease.lease_id])
    outcomes = await again

    assert set(ids(first)) <= set(ids(outcomes)) | {first[0].lease.lease_id}
    assert len(set(ids(outcomes))) == 3


async def test_a_new_broker_gives_the_leases_of_its_predecessor_again() -> None:
    nodes = MemoryHostClient()
    first = await launched(started(nodes), request(count=3))

    successor = started(nodes)
    again = await launched(successor, request(count=3))

    assert ids(again) == ids(first)
    assert len(nodes.held["n1"]) == 3
    with pytest.raises(ReusedIdError):
        await launched(successor, request(count=2))


async def test_a_request_that_comes_before_the_first_heartbeats_waits_for_them() -> None:
    nodes = MemoryHostClient()
    first = await launched(started(nodes, "n1", "n2", spec=pool(2)), request(count=4))

    successor = Broker(pool(2), nodes)
    waiting = asyncio.create_task(launched(successor, request(count=4)))
    await asyncio.sleep(0)
    successor.heartbeat(nodes.heartbeat("n1"))
    await asyncio.sleep(0)
    assert not waiting.done()
    successor.started_s -= REBUILD_S
    successor.heartbeat(nodes.heartbeat("n2"))

    assert ids(await waiting) == ids(first)
    assert sum(map(len, nodes.held.values())) == 4


async def test_a_repeated_request_finds_its_leases_on_a_pool_without_a_free_slot() -> None:
    nodes = MemoryHostClient(slots=3)
    first = await launched(started(nodes), request(count=3))

    successor = Broker(pool(), nodes)
    waiting = asyncio.create_task(launched(successor, request(count=3)))
    await asyncio.sleep(0)
    successor.heartbeat(nodes.heartbeat("n1"))
    successor.started_s -= REBUILD_S
    await successor.tick()

    assert ids(await waiting) == ids(first)


@pytest.mark.parametrize("order", [("n1", "n2"), ("n2", "n1")])
@pytest.mark.parametrize("is_asked_early", [False, True])
async def test_a_new_broker_keeps_the_lease_that_its_predecessor_granted_after_a_silence(
    order: tuple[str, str], *, is_asked_early: bool
) -> None:
    nodes = MemoryHostClient()
    broker = started(nodes)
    [old] = await launched(broker, request())
    silent = broker.ledger.hosts.get("n1")
    assert silent is not None
    silent.seen_s -= 2 * LOST_AFTER_S
    await broker.tick()
    broker.heartbeat(nodes.heartbeat("n2"))
    await asyncio.sleep(0.002)  # leases are told apart by the milliseconds of their ends
    [new] = await launched(broker, request())
    assert {*nodes.held["n1"], *nodes.held["n2"]} == {old.lease.lease_id, new.lease.lease_id}

    successor = Broker(pool(), nodes)
    if not is_asked_early:
        successor.started_s -= REBUILD_S
        for name in order:
            successor.heartbeat(nodes.heartbeat(name))
    again = asyncio.create_task(launched(successor, request()))
    await asyncio.sleep(0)
    if is_asked_early:
        for name in order:
            successor.heartbeat(nodes.heartbeat(name))
            await asyncio.sleep(0)
        assert not again.done()
        successor.started_s -= REBUILD_S
        await successor.tick()

    assert ids(await again) == [new.lease.lease_id]
    for name in order:
        answer = successor.heartbeat(nodes.heartbeat(name))
        assert list(answer.close_lease_ids) == [old.lease.lease_id] * (name == "n1")


async def test_a_broker_does_not_wait_for_ever_for_a_host_that_is_gone() -> None:
    nodes = MemoryHostClient()
    broker = Broker(pool(2), nodes, started_s=time.monotonic() - REBUILD_S - 1)
    broker.heartbeat(nodes.heartbeat("n1"))

    assert len(await launched(broker, request(count=2))) == 2


async def test_who_waits_gets_the_slot_that_is_released() -> None:
    nodes = MemoryHostClient(slots=1)
    broker = started(nodes)
    (first,) = await launched(broker, request("a"))
    second = asyncio.create_task(launched(broker, request("b")))
    await asyncio.sleep(0)
    assert len(broker.queue) == 1

    await broker.release([first.lease.lease_id])

    (outcome,) = await second
    assert outcome.lease.lease_id in nodes.held["n1"]
    assert len(nodes.held["n1"]) == 1


async def test_a_slot_that_expires_goes_to_who_waits() -> None:
    nodes = MemoryHostClient(slots=1)
    broker = started(nodes)
    (first,) = await launched(broker, request("a"))
    second = asyncio.create_task(launched(broker, request("b")))
    await asyncio.sleep(0)
    broker.ledger.renew([first.lease.lease_id], expires_unix_ms=1, now_s=0)

    await broker.tick()

    assert (await second)[0].HasField("lease")
    assert broker.ledger.expired_total == 1


async def test_who_waits_too_long_is_told() -> None:
    broker = started(MemoryHostClient(slots=1))
    await launched(broker, request("a"))
    late = asyncio.create_task(launched(broker, request("b", queue_timeout_seconds=1)))
    await asyncio.sleep(0)
    for batch in broker.queue.batches():
        batch.deadline_s = time.monotonic()

    await broker.tick()

    assert (await late)[0].failure.reason == "QueueTimeout"


async def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    broker = started(MemoryHostClient(slots=1), spec=pool(max_queue=3))
    waiting = asyncio.create_task(launched(broker, request("a", count=4)))
    await asyncio.sleep(0.01)
    assert len(broker.queue) == 3

    with pytest.raises(FullError) as caught:
        await launched(broker, request("b"))

    assert caught.value.retry_after_s > 0
    assert len(broker.queue) == 3
    waiting.cancel()


async def test_an_order_that_fails_goes_to_another_host() -> None:
    nodes = MemoryHostClient(failing={"n1"})
    broker = started(nodes, "n1", "n2", spec=pool(2))

    outcomes = await launched(broker, request(count=4))

    assert {o.lease.endpoint for o in outcomes} == {"n2"}


async def test_an_environment_that_three_hosts_failed_is_a_failure() -> None:
    nodes = MemoryHostClient(failing={"n1"})
    broker = started(nodes)
    waiting = asyncio.create_task(launched(broker, request()))
    for _ in range(3):
        await asyncio.sleep(0.01)
        broker.heartbeat(nodes.heartbeat("n1"))

    (outcome,) = await waiting
    assert outcome.failure.reason == "NodeFailed"
    assert "does not answer" in outcome.failure.message


async def test_a_host_that_is_fuller_than_thought_keeps_the_order_waiting() -> None:
    nodes = MemoryHostClient(slots=1)
    broker = started(nodes)
    foreign = environments_pb2.HeldLease(lease=environments_pb2.Lease(lease_id="foreign"))
    nodes.held["n1"] = {"foreign": foreign}
    waiting = asyncio.create_task(launched(broker, request()))
    await asyncio.sleep(0.01)
    assert not waiting.done()

    nodes.held["n1"].clear()
    broker.heartbeat(nodes.heartbeat("n1"))

    assert (await waiting)[0].HasField("lease")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"count": 5000}, "count"),
        ({"template": "java"}, "template"),
        ({"toolset": "Other"}, "toolset"),
        ({"ttl_seconds": 1 << 30}, "ttl_seconds"),
        ({"workspace": environments_pb2.WorkspaceSource(uri="/etc")}, "workspace.uri"),
    ],
)
async def test_a_request_that_cannot_be_served_names_its_field(
    fields: dict[str, object], named: str
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        await launched(started(MemoryHostClient()), request(**fields))  # type: ignore[arg-type]

    assert caught.value.field == named


async def test_renewals_name_the_leases_that_are_gone() -> None:
    broker = started(MemoryHostClient())
    (outcome,) = await launched(broker, request())
    before = outcome.lease.expires_unix_ms

    assert broker.renew([outcome.lease.lease_id, "other"], 3600) == ["other"]
    assert broker.ledger.leases[outcome.lease.lease_id].lease.expires_unix_ms > before + 3_000_000


async def test_a_run_cannot_hold_or_wait_for_more_than_its_quota() -> None:
    broker = started(MemoryHostClient(), spec=pool(max_per_run=3))
    await launched(broker, request("a", count=2))

    with pytest.raises(FullError, match="gives a run 3"):
        await launched(broker, request("b", count=2))

    assert len(await launched(broker, request("c", count=2, run_id="another"))) == 2


async def test_a_client_that_went_away_leaves_no_debt() -> None:
    broker = started(MemoryHostClient(slots=1), spec=pool(max_per_run=3))
    await some(broker, request("a", count=3), 1)

    assert broker.streams.num_missing("run") == 0


async def test_the_report_counts_what_there_is() -> None:
    nodes = MemoryHostClient(slots=3)
    broker = started(nodes)
    await launched(broker, request("a", count=2))
    waiting = asyncio.create_task(launched(broker, request("b", count=3)))
    await asyncio.sleep(0.01)

    present = make_report(broker)

    assert (present.nodes, present.slots, present.leased, present.waiting) == (1, 3, 3, 2)
    assert dict(present.leased_by_run) == {"run": 3}
    assert present.granted_total == 3
    assert present.isolation == environments_pb2.ISOLATION_WEAK
    waiting.cancel()


async def test_the_report_tells_what_a_pool_s_size_depends_on() -> None:
    nodes = MemoryHostClient()
    broker = started(nodes)
    told = nodes.heartbeat("n1")
    told.levels.add(template="python", paused_clones=5, resident=True)
    broker.heartbeat(told)
    outcomes = await launched(broker, request(count=4))
    for granted in broker.ledger.leases.values():
        granted.granted_s -= 30
    await broker.release(ids(outcomes))
    for start, start_ms in ((environments_pb2.START_SPAWN, 7), (environments_pb2.START_SHELL, 2)):
        lease = environments_pb2.Lease(start=start, start_ms=start_ms)
        broker.statistics.record_grant(lease, waited_s=0.1)

    await broker.tick()
    present = make_report(broker)

    assert (present.ready, present.opening, present.planned) == (1, 0, 0)
    assert (present.start_p50_ms, present.start_p95_ms) == (2, 7)
    assert present.warm_percent == 50
    assert present.lease_p50_seconds == 30
