"""Real servers and real channels with real certificates."""

import asyncio
import logging
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support import pki
from typing_extensions import override

from etude.common.errors import UserError
from etude.common.rpc.channels import dial
from etude.common.rpc.server import Server
from etude.common.tls import metrics
from etude.common.tls.credentials import Credentials
from etude.common.tls.identity import Identity
from etude.common.tls.targets import named_target
from etude.common.tls.transport import TransportSecurity, security_from_setting
from etude.v1 import (
    environments_pb2,
    environments_pb2_grpc,
    rewards_pb2,
    rewards_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0


def who(role: str, run: str = "a", pool: str = "", namespace: str = "lab") -> Identity:
    return Identity(domain="etude.dev", namespace=namespace, run=run, pool=pool, role=role)


OPERATOR = Identity(domain="etude.dev", namespace="etude-system", role="operator")


class Rewards(rewards_pb2_grpc.RewardServiceServicer):
    """Answers everybody who gets through."""

    @override
    async def Score(self, request: Any, context: Any) -> rewards_pb2.ScoreResponse:
        return rewards_pb2.ScoreResponse(rubric_digest="d")

    @override
    async def Describe(self, request: Any, context: Any) -> rewards_pb2.DescribeResponse:
        return rewards_pb2.DescribeResponse()


class Broker(environments_pb2_grpc.EnvBrokerServiceServicer):
    """Says yes to heartbeats and renewals."""

    @override
    async def Heartbeat(self, request: Any, context: Any) -> environments_pb2.HeartbeatResponse:
        return environments_pb2.HeartbeatResponse()

    @override
    async def RenewLeases(self, request: Any, context: Any) -> environments_pb2.RenewLeasesResponse:
        return environments_pb2.RenewLeasesResponse()

    async def _none(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    LaunchBatch: Any = _none
    ReleaseLeases: Any = _none
    ReportPlan: Any = _none
    PrepareGroup: Any = _none
    DescribePool: Any = _none
    GrantReads: Any = _none
    ListShards: Any = _none


class Run(run_pb2_grpc.RunServiceServicer):
    """A stream that goes on for as long as somebody says so."""

    def __init__(self) -> None:
        self.next = asyncio.Event()

    @override
    async def WatchRun(self, request: Any, context: Any) -> AsyncIterator[run_pb2.WatchRunResponse]:
        sequence = 0
        while True:
            sequence += 1
            yield run_pb2.WatchRunResponse(sequence=sequence)
            await self.next.wait()
            self.next.clear()

    @override
    async def Command(self, request: Any, context: Any) -> run_pb2.CommandResponse:
        return run_pb2.CommandResponse()


class World:
    """One CA, and whoever is made in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = pki.Authority()
        self.servers: list[Server] = []
        self.run = Run()

    def place(self, identity: Identity, name: str = "") -> Path:
        return self.folder / (name or identity.uri.removeprefix("spiffe://").replace("/", "-"))

    def wire(self, identity: Identity, name: str = "", **issued: Any) -> TransportSecurity:
        authority = issued.pop("authority", self.authority)
        folder = pki.write(self.place(identity, name), authority.issue(identity, **issued))
        return TransportSecurity(credentials=Credentials(folder, look_every_s=0))

    async def serve(self, identity: Identity, **issued: Any) -> str:
        """A server with every service; the answer is how to dial it."""
        wire = self.wire(identity, f"server-{len(self.servers)}", **issued)
        server = Server(["etude.v1.RewardService"], security=wire)
        rewards_pb2_grpc.add_RewardServiceServicer_to_server(Rewards(), server.grpc_server)
        environments_pb2_grpc.add_EnvBrokerServiceServicer_to_server(Broker(), server.grpc_server)
        run_pb2_grpc.add_RunServiceServicer_to_server(self.run, server.grpc_server)
        await server.start()
        await server.set_ready()
        self.servers.append(server)
        return named_target(identity.server_name, f"127.0.0.1:{server.port}")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    for server in made.servers:
        await server.stop(0)


Method = Callable[[grpc.aio.Channel], Awaitable[Any]]


async def score(channel: grpc.aio.Channel) -> Any:
    request = rewards_pb2.ScoreRequest(group_id="g")
    return await rewards_pb2_grpc.RewardServiceStub(channel).Score(request, timeout=WAIT_S)


async def renew(channel: grpc.aio.Channel) -> Any:
    stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
    return await stub.RenewLeases(environments_pb2.RenewLeasesRequest(), timeout=WAIT_S)


async def beat(channel: grpc.aio.Channel) -> Any:
    stub = environments_pb2_grpc.EnvBrokerServiceStub(channel)
    return await stub.Heartbeat(environments_pb2.HeartbeatRequest(), timeout=WAIT_S)


async def command(channel: grpc.aio.Channel) -> Any:
    stub = run_pb2_grpc.RunServiceStub(channel)
    return await stub.Command(run_pb2.CommandRequest(), timeout=WAIT_S)


async def healthy(channel: grpc.aio.Channel) -> Any:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)


@pytest.mark.parametrize(
    ("callee", "caller", "method"),
    [
        (who("rewards"), who("trainer"), score),
        (who("trainer"), OPERATOR, command),
        (who("broker", "a", "p"), who("trainer"), renew),
        (who("broker", "", "shared"), who("trainer", "b"), renew),
        (who("broker", "a", "p"), who("node", "a", "p"), beat),
        (who("rewards"), who("inference"), healthy),
    ],
)
async def test_a_part_that_is_on_the_list_is_answered(
    world: World, callee: Identity, caller: Identity, method: Method
) -> None:
    target = await world.serve(callee)
    async with dial(target, security=world.wire(caller)) as channel:
        assert await method(channel) is not None


@pytest.mark.parametrize(
    ("callee", "caller", "method"),
    [
        (who("rewards", "b"), who("trainer", "a"), score),
        (who("broker", "b", "p"), who("trainer", "a"), renew),
        (who("rewards", namespace="other"), who("trainer"), score),
        (who("broker", "a", "p"), who("node", "a", "q"), beat),
        (who("broker", "a", "p"), who("trainer"), beat),
        (who("broker", "a", "p"), who("node", "a", "p"), renew),
        (who("trainer"), who("inference"), command),
    ],
)
async def test_a_part_that_is_not_on_the_list_is_refused_by_both_names(
    world: World, callee: Identity, caller: Identity, method: Method
) -> None:
    target = await world.serve(callee)
    before = metrics.REFUSED.labels("server")._value.get()
    async with dial(target, security=world.wire(caller)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(channel)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert caller.uri in str(caught.value.details())
    assert callee.uri in str(caught.value.details())
    assert metrics.REFUSED.labels("server")._value.get() == before + 1


STRANGERS = {
    "another CA": (
        "refuses our certificate",
        lambda w: {"authority": pki.Authority(), "trusts": w.authority.pem},
    ),
    "expired": ("refuses our certificate", lambda _: {"ends": pki.now() - pki.HOUR / 2}),
    "not valid yet": ("refuses our certificate", lambda _: {"begins": pki.now() + pki.HOUR / 2}),
}


@pytest.mark.parametrize("why", STRANGERS)
async def test_a_client_whose_certificate_is_no_good_is_told_so(
    world: World, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    caplog.set_level(logging.WARNING, "etude.common.tls.rotating_channel")
    words, issued = STRANGERS[why]
    target = await world.serve(who("rewards"))
    async with dial(target, security=world.wire(who("trainer"), **issued(world))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: words in caplog.text)


IMPOSTORS: dict[str, Callable[[], dict[str, Any]]] = {
    "self-signed certificate|unable to get local issuer": lambda: {"authority": pki.Authority()},
    "certificate has expired": lambda: {"ends": pki.now() - pki.HOUR / 2},
    "certificate is not yet valid": lambda: {"begins": pki.now() + pki.HOUR / 2},
}
"""Issued when a test runs: half an hour after they were collected, "not yet" would be now."""


@pytest.mark.parametrize("why", IMPOSTORS)
async def test_a_server_whose_certificate_is_no_good_is_not_called(
    world: World, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    caplog.set_level(logging.WARNING, "etude.common.tls.rotating_channel")
    target = await world.serve(who("rewards"), **IMPOSTORS[why]())
    async with dial(target, security=world.wire(who("trainer"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: any(each in caplog.text for each in why.split("|")))


async def test_a_server_of_another_run_that_answers_at_the_address_is_not_called(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "etude.common.tls.rotating_channel")
    impostor = await world.serve(who("rewards", "b"))
    address = impostor.rpartition("@")[2]
    mine = who("rewards", "a").server_name
    async with dial(named_target(mine, address), security=world.wire(who("trainer"))) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: f"not good for {mine}" in caplog.text)


async def test_who_dials_anew_for_each_call_learns_why_it_fails(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "etude.common.tls.rotating_channel")
    target = await world.serve(who("rewards"), authority=pki.Authority())
    channel = dial(target, security=world.wire(who("trainer")))
    with pytest.raises(grpc.aio.AioRpcError):
        await score(channel)
    await channel.close()
    assert "its certificate is not good for a-rewards.lab.svc" in caplog.text


async def test_a_client_in_the_clear_gets_nothing(world: World) -> None:
    target = await world.serve(who("rewards"))
    async with dial(target, security=security_from_setting("Plaintext")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await score(channel)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_certificates_and_their_ca_change_under_calls_and_none_fails(world: World) -> None:
    """Twenty rotations of both sides; every second one brings another CA."""
    target = await world.serve(who("trainer"))
    client = world.wire(OPERATOR)
    server_folder, client_folder = world.place(OPERATOR, "server-0"), world.place(OPERATOR)
    authority, both = world.authority, world.authority.pem
    async with dial(target, security=client) as channel:
        stream = run_pb2_grpc.RunServiceStub(channel).WatchRun(run_pb2.WatchRunRequest())
        heard = [(await anext(aiter(stream))).sequence]
        reading = aiter(stream)
        for turn in range(20):
            if turn % 2:
                successor = pki.Authority(f"ca-{turn}")
                both = authority.pem + successor.pem
                pki.write(server_folder, authority.issue(who("trainer"), trusts=both))
                pki.write(client_folder, authority.issue(OPERATOR, trusts=both))
                authority = successor
            pki.write(server_folder, authority.issue(who("trainer"), trusts=both))
            await command(channel)
            pki.write(client_folder, authority.issue(OPERATOR, trusts=both))
            await command(channel)
            world.run.next.set()
            heard.append((await anext(reading)).sequence)
        assert heard == list(range(1, 22)), "the stream began before the first of them"
        stream.cancel()


async def test_a_channel_that_is_closed_ends_calls_of_every_certificate(world: World) -> None:
    target = await world.serve(who("trainer"))
    channel = dial(target, security=world.wire(OPERATOR))
    stream = run_pb2_grpc.RunServiceStub(channel).WatchRun(run_pb2.WatchRunRequest())
    assert (await anext(aiter(stream))).sequence == 1
    pki.write(world.place(OPERATOR), world.authority.issue(OPERATOR))
    await command(channel)
    assert not stream.done(), "it goes on over the connection that it began on"
    await channel.close()
    async with asyncio.timeout(WAIT_S):
        assert await stream.code() is grpc.StatusCode.CANCELLED


async def test_files_that_cannot_be_used_leave_the_certificate_that_could(world: World) -> None:
    identity = who("trainer")
    wire = world.wire(identity)
    assert wire.credentials is not None
    before = wire.credentials.current()
    (world.place(identity) / "tls.key").resolve().write_bytes(b"nonsense")
    assert wire.credentials.current() is before
    pki.write(world.place(identity), world.authority.issue(identity))
    assert wire.credentials.current().certificate != before.certificate


async def test_without_certificates_nobody_beyond_the_machine_is_spoken_to() -> None:
    silent = security_from_setting("")
    with pytest.raises(UserError, match="would not be encrypted"):
        dial("10.1.2.3:7000", security=silent)
    with pytest.raises(UserError, match="would not be encrypted"):
        await Server(["etude.v1.RewardService"], host="0.0.0.0", security=silent).start()
    server = Server(["etude.v1.RewardService"], host="127.0.0.1", security=silent)
    await server.start()
    await server.stop(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - what is waited for is a line of a log
            await asyncio.sleep(0.02)


async def test_the_guides_certificates_let_a_namespace_and_the_operator_talk(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "how-to" / "encrypt-the-wire.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    words = ("bash", "-euc", block)
    await asyncio.to_thread(subprocess.run, words, cwd=tmp_path, check=True, timeout=60)
    lab, operator = (
        TransportSecurity(credentials=Credentials(tmp_path / name)) for name in ("lab", "operator")
    )
    server = Server(["etude.v1.RewardService"], security=lab)
    rewards_pb2_grpc.add_RewardServiceServicer_to_server(Rewards(), server.grpc_server)
    run_pb2_grpc.add_RunServiceServicer_to_server(Run(), server.grpc_server)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    try:
        async with dial(named_target("demo-rewards", address), security=lab) as channel:
            assert (await score(channel)).rubric_digest == "d"
            with pytest.raises(grpc.aio.AioRpcError, match="that is for operator"):
                await command(channel)
        async with dial(
            named_target("demo-trainer.lab.svc", address), security=operator
        ) as channel:
            assert await command(channel) is not None
        async with dial(
            named_target("demo-trainer.other.svc", address), security=operator
        ) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await command(channel)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)
