"""Snapshots, forks, rollbacks and pauses over the wire: real broker, real node, real sandboxes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from tests.support.environments.pool_client import DEADLINE_S, Pool

from etude.common.errors import UnavailableError
from etude.common.rpc import channels
from etude.envserver.broker import lease_ledger
from etude.envserver.host import heartbeat
from etude.trainer.rollouts.outage import OutageBudget
from etude.trainer.rollouts.snapshot_client import SnapshotClient, fork_request
from etude.v1 import environment_state_pb2_grpc, environments_pb2
from etude.v1.environment_state_pb2 import (
    DropSnapshotsRequest,
    PauseRequest,
    ResumeRequest,
    RollbackRequest,
    SnapshotRequest,
)

OUTAGE_S = 60
FIX = ("search_replace", {"path": "shop/core.py", "old_string": "a - b", "new_string": "a + b"})
SPOIL = ("search_replace", {"path": "shop/core.py", "old_string": "a + b", "new_string": "a * b"})
TEST = ("run_terminal", {"command": "pytest -q"})


class States:
    """Makes clients of leases."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def stub(
        self, lease: environments_pb2.Lease
    ) -> "environment_state_pb2_grpc.EnvStateServiceAsyncStub":
        if lease.endpoint not in self._channels:
            self._channels[lease.endpoint] = channels.dial(lease.endpoint)
        return environment_state_pb2_grpc.EnvStateServiceStub(self._channels[lease.endpoint])

    def of(self, lease: environments_pb2.Lease) -> SnapshotClient:
        return SnapshotClient(self.stub(lease), lease, OutageBudget(OUTAGE_S), DEADLINE_S)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


@pytest.fixture
async def states() -> AsyncIterator[States]:
    made = States()
    yield made
    await made.close()


async def launched(
    pool: Pool, request: environments_pb2.LaunchBatchRequest
) -> list[environments_pb2.Lease]:
    outcomes = [each async for each in pool.broker.LaunchBatch(request, timeout=DEADLINE_S)]
    assert all(each.HasField("lease") for each in outcomes), outcomes
    return [each.lease for each in sorted(outcomes, key=lambda each: each.index)]


async def test_a_rollout_is_saved_put_back_and_forked(pool: Pool, states: States) -> None:
    request = pool.request("parent")
    (parent,) = await launched(pool, request)
    assert parent.caps == environments_pb2.Caps(files=True, freeze=True, portable=True, egress=True)
    assert parent.start == environments_pb2.START_COPY
    await pool.turn(parent, ("1", *FIX))
    saved = await states.of(parent).snapshot("good")
    assert saved.size_bytes > 0
    assert not saved.has_memory
    assert await states.of(parent).snapshot("good") == saved
    await pool.turn(parent, ("2", *SPOIL))
    assert "failed" in (await pool.turn(parent, ("3", *TEST)))[0]

    children = await launched(pool, fork_request(request, "good", count=2))
    await states.of(parent).rollback("good")

    for lease in (parent, *children):
        assert await pool.turn(lease, ("9", *TEST)) == ["1 passed"]
    tokens = {each.control_token for each in (parent, *children)}
    assert len(tokens) == 3
    assert all(each.start == environments_pb2.START_DELTA for each in children)
    assert await pool.diff(children[0]) == await pool.diff(parent)
    assert await states.of(parent).drop(["good", "never"]) == ["never"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await states.of(parent).rollback("good")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.fixture
def _rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 60.0)
    monkeypatch.setattr(lease_ledger, "LOST_AFTER_S", 300.0)


@pytest.mark.usefixtures("_rare_heartbeats", "pool")
async def test_a_fork_waits_for_no_heartbeat_but_the_one_of_its_snapshot(
    pool: Pool, states: States
) -> None:
    request = pool.request("parent")
    (parent,) = await launched(pool, request)
    await states.of(parent).snapshot("moment")
    assert await launched(pool, fork_request(request, "moment", count=1))


async def test_an_agents_token_opens_none_of_it(pool: Pool, states: States) -> None:
    (lease,) = await pool.launch("a")
    stub = states.stub(lease)
    name, token = lease.lease_id, lease.agent_token
    calls = (
        stub.Snapshot(SnapshotRequest(lease_id=name, control_token=token, snapshot_id="s")),
        stub.Rollback(RollbackRequest(lease_id=name, control_token=token, snapshot_id="s")),
        stub.Pause(PauseRequest(lease_id=name, control_token=token)),
        stub.Resume(ResumeRequest(lease_id=name, control_token=token)),
        stub.DropSnapshots(DropSnapshotsRequest(lease_id=name, control_token=token)),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_what_the_driver_cannot_save_is_refused_by_name(pool: Pool, states: States) -> None:
    (lease,) = await pool.launch("a")

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await states.of(lease).snapshot("s", with_memory=True)

    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "driver process has no cap 'memory'" in str(refused.value.details())


async def test_a_paused_environment_does_nothing_until_it_is_resumed(
    pool: Pool, states: States
) -> None:
    (lease,) = await pool.launch("a")
    await pool.turn(lease, ("1", *FIX))
    await states.of(lease).pause()

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await pool.turn(lease, ("2", *TEST))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    assert await states.of(lease).resume() == lease.expires_unix_ms
    assert await pool.turn(lease, ("2", *TEST)) == ["1 passed"]


async def test_a_lease_that_nobody_renewed_is_kept_and_resumed(pool: Pool, states: States) -> None:
    request = pool.request("a", ttl_seconds=1)
    request.on_expiry = environments_pb2.ON_EXPIRY_PAUSE
    (lease,) = await launched(pool, request)
    await pool.turn(lease, ("1", *FIX))
    await until(lambda: is_kept(pool, lease))

    await states.of(lease).resume(ttl_s=60)

    assert await pool.turn(lease, ("2", *TEST)) == ["1 passed"]
    await until(lambda: is_known(pool, lease))
    assert await pool.turn(lease, ("3", *TEST)) == ["1 passed"]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(10 * DEADLINE_S):
        if await holds():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never came to be")


async def is_kept(pool: Pool, lease: environments_pb2.Lease) -> bool:
    """Whether its node says that it has expired and can be resumed."""
    try:
        await pool.turn(lease, ("9", *TEST))
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.FAILED_PRECONDITION
    return False


async def is_known(pool: Pool, lease: environments_pb2.Lease) -> bool:
    """Whether it is a lease of the broker, which can be renewed."""
    request = environments_pb2.RenewLeasesRequest(lease_ids=[lease.lease_id], ttl_seconds=60)
    return not (await pool.broker.RenewLeases(request, timeout=DEADLINE_S)).missing_lease_ids


async def test_a_client_waits_for_a_host_that_is_away_as_long_as_it_may(states: States) -> None:
    lease = environments_pb2.Lease(lease_id="a", endpoint="127.0.0.1:9")
    impatient = SnapshotClient(states.stub(lease), lease, OutageBudget(0), DEADLINE_S)

    with pytest.raises(UnavailableError, match=r"node 127\.0\.0\.1:9"):
        await impatient.snapshot("s")
