"""The operator's client against a real service of releases, each known by its certificate."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from tests.support import pki

from etude.common import api_keys
from etude.common.api.route.request import RequestedAction, RouteRequest
from etude.common.api.route.status import PolicyRouteStatus
from etude.common.blobs import open_store
from etude.common.rpc import channels
from etude.common.rpc.server import Server
from etude.common.tls.credentials import Credentials
from etude.common.tls.identity import Identity
from etude.common.tls.targets import named_target
from etude.common.tls.transport import TransportSecurity
from etude.feedback.clock import LedgerClock
from etude.feedback.release.release_log import ReleaseLog
from etude.feedback.release.rules import ReleaseRules
from etude.feedback.release.server import SERVICES
from etude.feedback.release.service import ReleaseService
from etude.operator.remotes.clients import GrpcRemoteClient, RemoteError
from etude.operator.remotes.release_order import ReleaseOrder
from etude.operator.routes.releases import release_figures
from etude.v1 import release_pb2, release_pb2_grpc

OPERATOR = Identity(domain="etude.dev", namespace="etude-system", role="operator")
FEEDBACK = Identity(domain="etude.dev", namespace="lab", route="coder", role="feedback")
GATEWAY = Identity(domain="etude.dev", namespace="lab", route="coder", role="gateway")


class Wire(NamedTuple):
    """A service, and certificates of whoever calls it."""

    target: str
    folder: Path
    authority: pki.Authority

    def security(self, identity: Identity) -> TransportSecurity:
        folder = pki.write(self.folder / identity.role, self.authority.issue(identity))
        return TransportSecurity(credentials=Credentials(folder, look_every_s=0))

    def order(self, action: RequestedAction, name: str, version: str | None) -> ReleaseOrder:
        request = RouteRequest(action=action, version=version, without_gate=True, key="1")
        return ReleaseOrder(target=self.target, request_id=name, request=request, run_uid="uid-run")


def make_service(folder: Path, *, trusts_network: bool = False) -> ReleaseService:
    _, line = api_keys.make_key("alice", "admin")
    (folder / "keys").write_text(f"{line}\n")
    releases = ReleaseLog.open(open_store(f"file://{folder}/store"), ReleaseRules())
    keys = api_keys.ApiKeyFile.load(folder / "keys")
    return ReleaseService(releases, LedgerClock(0), keys, trusts_network)


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    made = Wire("", tmp_path, pki.Authority())
    service = make_service(tmp_path)
    server = Server([SERVICES[0]], security=made.security(FEEDBACK))
    release_pb2_grpc.add_ReleaseServiceServicer_to_server(service, server.grpc_server)
    await server.start()
    yield made._replace(target=named_target(FEEDBACK.server_name, f"127.0.0.1:{server.port}"))
    await server.stop(0)


async def status(client: GrpcRemoteClient, target: str) -> PolicyRouteStatus:
    async for report in client.watch_release(target):
        figures = release_figures(PolicyRouteStatus(), report, {"stable": "1/1", "canary": "1/1"})
        return PolicyRouteStatus().model_copy(update=figures)
    raise AssertionError("no report")


async def test_what_people_ask_for_is_decided_once_and_shown(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = wire.security(OPERATOR)
    monkeypatch.setattr(channels, "process_security", lambda: operator)
    client = GrpcRemoteClient()
    promote = wire.order(RequestedAction.PROMOTE, "first", "1.7")
    decision = await client.ask_release(wire.target, promote)
    assert decision.action in {"Promote", "Adopt"}
    # Sent again after a crash, it is the same decision.
    assert await client.ask_release(wire.target, promote) == decision
    found = await status(client, wire.target)
    assert found.stable is not None
    assert (found.stable.version, found.policy, found.freeze) == ("1.7", "Automatic", "")
    assert found.decision is not None
    assert found.decision.sentence == decision.sentence
    frozen = await client.ask_release(
        wire.target, wire.order(RequestedAction.FREEZE, "second", None)
    )
    assert frozen.action == "Freeze"
    assert (await status(client, wire.target)).freeze
    refused = await client.ask_release(
        wire.target, wire.order(RequestedAction.PROMOTE, "third", "1.8")
    )
    assert refused.action == "Refuse"


async def test_what_the_service_rejects_is_an_answer(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = wire.security(OPERATOR)
    monkeypatch.setattr(channels, "process_security", lambda: operator)
    wrong = wire.order(RequestedAction.FREEZE, "no name of a request", None)
    decision = await GrpcRemoteClient().ask_release(wire.target, wrong)
    assert decision == release_pb2.ReleaseDecision(action="Refuse", sentence=decision.sentence)
    assert "request_id" in decision.sentence


async def test_no_other_part_of_the_route_changes_what_is_served(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = wire.security(GATEWAY)
    monkeypatch.setattr(channels, "process_security", lambda: gateway)
    decision = await GrpcRemoteClient().ask_release(
        wire.target, wire.order(RequestedAction.PROMOTE, "first", "1.7")
    )
    assert decision.action == "Refuse"
    assert "may not call" in decision.sentence


async def test_without_certificates_the_operator_is_known_only_where_the_network_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plaintext = TransportSecurity()
    monkeypatch.setattr(channels, "process_security", lambda: plaintext)
    server = Server([SERVICES[0]], security=plaintext)
    service = make_service(tmp_path)
    release_pb2_grpc.add_ReleaseServiceServicer_to_server(service, server.grpc_server)
    await server.start()
    client, target = GrpcRemoteClient(), f"127.0.0.1:{server.port}"
    order = Wire(target, tmp_path, pki.Authority()).order(RequestedAction.PROMOTE, "first", "1.7")
    with pytest.raises(RemoteError, match="API key is missing"):
        await client.ask_release(target, order)

    service.trusts_network = True
    decision = await client.ask_release(target, order)
    assert decision.sentence == "1.7 promoted without a passed gate by operator/kubectl"
    found = (await status(client, target)).stable
    assert found is not None
    assert found.version == "1.7"
    async with channels.dial(target) as channel:
        stub = release_pb2_grpc.ReleaseServiceStub(channel)
        request = release_pb2.GetReleaseStatusRequest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # a key that is shown has to be right
            await stub.GetReleaseStatus(request, metadata=(("authorization", "Bearer x"),))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(0)
