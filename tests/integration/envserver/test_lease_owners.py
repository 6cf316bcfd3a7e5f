"""Leases over mutual TLS: no run touches those of another, even with their ids and tokens."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import pki
from tests.support.environments.brokers import lone_service

from etude.common.api.pool.spec import EnvPoolSpec, Isolation, IsolationLevel, Template, Trust
from etude.common.rpc import channels, server
from etude.common.rpc.broker_addresses import BrokerAddresses
from etude.common.tls.credentials import Credentials
from etude.common.tls.identity import Identity
from etude.common.tls.targets import named_target
from etude.common.tls.transport import TransportSecurity
from etude.envserver.broker.broker import REBUILD_S, Broker
from etude.envserver.broker.host_client import GrpcHostClient
from etude.envserver.drivers.in_memory import MemoryDriver
from etude.envserver.host.access_service import AccessService
from etude.envserver.host.broker_links import BrokerLinks
from etude.envserver.host.grading.grader import Grader
from etude.envserver.host.heartbeat import HostHeartbeat
from etude.envserver.host.host import Host
from etude.envserver.host.service import HostService
from etude.envserver.host.snapshots.state_service import StateService
from etude.envserver.host.workspace_sources import WorkspaceSources
from etude.v1 import (
    environment_access_pb2,
    environment_access_pb2_grpc,
    environment_state_pb2,
    environment_state_pb2_grpc,
    environments_pb2,
    environments_pb2_grpc,
)

WAIT_S = 30.0
SPEC = EnvPoolSpec(
    templates=(Template(name="python", trust=Trust.TRUSTED),),
    isolation=Isolation(minimum=IsolationLevel.PROCESS),
    slots_per_replica=4,
)


@dataclass(slots=True)
class Caller:
    """A run's clients of the pool."""

    broker: "environments_pb2_grpc.EnvBrokerServiceAsyncStub"
    channel: grpc.aio.Channel
    """To the host."""

    async def launch(self, key: str, **fields: str) -> environments_pb2.LaunchBatchResponse:
        request = environments_pb2.LaunchBatchRequest(
            run_id="same", idempotency_key=key, template="python", count=1, toolset="Compact"
        )
        request.workspace.uri = "empty:"
        for name, value in fields.items():
            setattr(request, name, value)
        return await anext(aiter(self.broker.LaunchBatch(request, timeout=WAIT_S)))


class Lab:
    """A pool whose parts have certificates, and callers with theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = pki.Authority()
        self.broker_target = self.host_target = ""

    def security(self, role: str, run: str = "", pool: str = "") -> TransportSecurity:
        who = Identity(domain="etude.dev", namespace="lab", run=run, pool=pool, role=role)
        place = self.folder / (run + pool + role)
        made = pki.write(place, self.authority.issue(who))
        return TransportSecurity(credentials=Credentials(made))

    def caller(self, role: str, run: str = "", pool: str = "") -> Caller:
        security = self.security(role, run, pool)
        broker = channels.dial(self.broker_target, security=security)
        host = channels.dial(self.host_target, security=security)
        return Caller(environments_pb2_grpc.EnvBrokerServiceStub(broker), host)


async def _serve(security: TransportSecurity, add: Callable[[grpc.aio.Server], None]) -> Any:
    made = server.Server([], security=security)
    add(made.grpc_server)
    await made.start()
    return made


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    made, stop = Lab(tmp_path), asyncio.Event()
    of_broker, of_host = made.security("broker", pool="p"), made.security("node", pool="p")
    hosts = GrpcHostClient(security=of_broker)
    broker = Broker(SPEC, hosts, started_s=-REBUILD_S)
    driver = MemoryDriver(tmp_path / "leases")
    await driver.start()
    host = Host(driver=driver, sources=WorkspaceSources(tmp_path), slots=4, templates={"python"})

    def add(grpc_server: grpc.aio.Server) -> None:
        service = HostService(host, Grader(driver, host.cache))
        environments_pb2_grpc.add_EnvNodeServiceServicer_to_server(service, grpc_server)
        access = AccessService(host)
        environment_access_pb2_grpc.add_EnvAccessServiceServicer_to_server(access, grpc_server)
        states = StateService(host)
        environment_state_pb2_grpc.add_EnvStateServiceServicer_to_server(states, grpc_server)

    brokers = await _serve(
        of_broker,
        lambda made: environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(
            lone_service(broker), made
        ),
    )
    nodes = await _serve(of_host, add)
    made.broker_target = named_target("p-broker.lab.svc", f"127.0.0.1:{brokers.port}")
    host.endpoint = made.host_target = named_target("p-node.lab.svc", f"127.0.0.1:{nodes.port}")
    links = BrokerLinks(BrokerAddresses(made.broker_target), "node-0", of_host)
    tasks = [
        asyncio.create_task(broker.run(stop)),
        asyncio.create_task(HostHeartbeat(host, links, "node-0").run(stop)),
    ]
    yield made
    stop.set()
    await asyncio.gather(*tasks)
    await links.close()
    await nodes.stop(0)
    await brokers.stop(0)
    await hosts.stop()


Call = Callable[[Caller, environments_pb2.Lease], Awaitable[Any]]


async def _renew(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environments_pb2.RenewLeasesRequest(lease_ids=[lease.lease_id])
    return await caller.broker.RenewLeases(request, timeout=WAIT_S)


async def _release(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environments_pb2.ReleaseLeasesRequest(lease_ids=[lease.lease_id])
    return await caller.broker.ReleaseLeases(request, timeout=WAIT_S)


async def _turn(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environments_pb2.RunTurnRequest(
        lease_id=lease.lease_id, agent_token=lease.agent_token
    )
    stub = environments_pb2_grpc.EnvNodeServiceStub(caller.channel)
    return await stub.RunTurn(request, timeout=WAIT_S)


async def _diff(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environments_pb2.DiffRequest(
        lease_id=lease.lease_id, control_token=lease.control_token
    )
    stub = environments_pb2_grpc.EnvNodeServiceStub(caller.channel)
    return [each async for each in stub.Diff(request, timeout=WAIT_S)]


async def _grade(caller: Caller, lease: environments_pb2.Lease) -> Any:
    async def requests() -> AsyncIterator[environments_pb2.GradeRequest]:
        yield environments_pb2.GradeRequest(
            lease_id=lease.lease_id, control_token=lease.control_token
        )

    stub = environments_pb2_grpc.EnvNodeServiceStub(caller.channel)
    return await stub.Grade(requests(), timeout=WAIT_S)


async def _snapshot(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environment_state_pb2.SnapshotRequest(
        lease_id=lease.lease_id, control_token=lease.control_token, snapshot_id="moment"
    )
    stub = environment_state_pb2_grpc.EnvStateServiceStub(caller.channel)
    return await stub.Snapshot(request, timeout=WAIT_S)


async def _pause(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environment_state_pb2.PauseRequest(
        lease_id=lease.lease_id, control_token=lease.control_token
    )
    stub = environment_state_pb2_grpc.EnvStateServiceStub(caller.channel)
    return await stub.Pause(request, timeout=WAIT_S)


async def _resume(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environment_state_pb2.ResumeRequest(
        lease_id=lease.lease_id, control_token=lease.control_token
    )
    stub = environment_state_pb2_grpc.EnvStateServiceStub(caller.channel)
    return await stub.Resume(request, timeout=WAIT_S)


async def _list(caller: Caller, lease: environments_pb2.Lease) -> Any:
    request = environment_access_pb2.ListFilesRequest(
        lease_id=lease.lease_id, control_token=lease.control_token
    )
    stub = environment_access_pb2_grpc.EnvAccessServiceStub(caller.channel)
    return [each async for each in stub.ListFiles(request, timeout=WAIT_S)]


async def _exec(caller: Caller, lease: environments_pb2.Lease) -> Any:
    async def requests() -> AsyncIterator[environment_access_pb2.ExecRequest]:
        opening = environment_access_pb2.ExecOpen(
            lease_id=lease.lease_id, control_token=lease.control_token, shell="true"
        )
        yield environment_access_pb2.ExecRequest(open=opening)

    stub = environment_access_pb2_grpc.EnvAccessServiceStub(caller.channel)
    return [each async for each in stub.Exec(requests(), timeout=WAIT_S)]


EVERY_CALL: list[Call] = [
    _renew,
    _release,
    _turn,
    _diff,
    _grade,
    _snapshot,
    _pause,
    _resume,
    _list,
    _exec,
]


async def test_another_run_cannot_touch_a_lease_even_with_its_id_and_tokens(lab: Lab) -> None:
    owner, thief = lab.caller("trainer", run="a"), lab.caller("trainer", run="b")
    lease = (await owner.launch("one")).lease

    for call in EVERY_CALL:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(thief, lease)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, call.__name__
        assert "is not one of run/b" in str(refused.value.details()), call.__name__

    assert await _diff(owner, lease)
    assert not (await _renew(owner, lease)).missing_lease_ids


async def test_another_run_gets_no_lease_by_the_run_id_and_key_of_the_first(lab: Lab) -> None:
    owner, thief = lab.caller("trainer", run="a"), lab.caller("trainer", run="b")

    first, again, stolen = [(await caller.launch("one")).lease for caller in (owner, owner, thief)]

    assert first.lease_id == again.lease_id
    assert stolen.lease_id != first.lease_id
    assert stolen.control_token != first.control_token


async def test_another_run_cannot_start_from_a_snapshot(lab: Lab) -> None:
    owner, thief = lab.caller("trainer", run="a"), lab.caller("trainer", run="b")
    lease = (await owner.launch("one")).lease
    await _snapshot(owner, lease)

    assert (await owner.launch("two", snapshot_id="moment")).HasField("lease")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await thief.launch("two", snapshot_id="moment")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_graders_of_a_run_use_its_leases_and_an_edge_does_not(lab: Lab) -> None:
    owner, grader = lab.caller("trainer", run="a"), lab.caller("rewards", run="a")
    edge = lab.caller("edge", pool="p")
    lease = (await owner.launch("one")).lease

    assert not (await _renew(grader, lease)).missing_lease_ids
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await _renew(edge, lease)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_run_id_that_looks_like_one_with_an_owner_is_refused(lab: Lab) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lab.caller("trainer", run="b").launch("one", run_id="run/a//same")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
