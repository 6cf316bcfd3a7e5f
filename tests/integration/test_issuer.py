"""An issuer and those who ask it, over real gRPC."""

import asyncio
import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from cryptography import x509
from tests.support import pki
from typing_extensions import override

from etude.common.errors import UserError
from etude.common.probes import Probes
from etude.common.rpc.server import Server
from etude.common.tls import material, sidecar
from etude.common.tls.certificate_request import (
    CertificateRequest,
    IssuerError,
    request_certificate,
)
from etude.common.tls.identity import Identity
from etude.common.tls.targets import named_target
from etude.common.tls.transport import security_from_setting
from etude.operator.issuer.server import IssuerCertificate
from etude.operator.issuer.service import CertificateService, MemoryTokenReviewer
from etude.v1 import certificates_pb2_grpc

TRAINER = "spiffe://etude.dev/ns/lab/run/demo/role/trainer"
ACCOUNT = "system:serviceaccount:lab:default"
OPERATOR = "spiffe://etude.dev/ns/etude-system/role/operator"
OPERATOR_ACCOUNT = "system:serviceaccount:etude-system:etude-operator"
HOST = "etude-operator.etude-system"
LIFE = datetime.timedelta(hours=24)
WAIT_S = 30.0


@dataclass
class World:
    """A running issuer, and a pod that may ask it."""

    folder: Path
    server: Server
    service: CertificateService

    @property
    def petition(self) -> CertificateRequest:
        name = "etude-issuer.etude-system.svc"
        return CertificateRequest(
            identity=TRAINER,
            issuer=named_target(name, f"127.0.0.1:{self.server.port}"),
            token=self.folder / "token",
            trust=self.folder / "trust",
        )


def add_ca(folder: Path, name: str, age: datetime.timedelta = datetime.timedelta(0)) -> bytes:
    made = pki.Authority(name, begins=pki.now() - age - pki.HOUR / 60, ends=pki.now() + 10 * LIFE)
    for part in ("ca", "trust"):
        (folder / part).mkdir(exist_ok=True)
        (folder / part / f"{name}.crt").write_bytes(made.pem)
    (folder / "ca" / f"{name}.key").write_bytes(made.key_pem)
    return made.pem


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    add_ca(tmp_path, "ca-1")
    (tmp_path / "token").write_text("good\n")
    service = CertificateService(
        reviews=MemoryTokenReviewer(
            {"good": (TRAINER, ACCOUNT), "ours": (OPERATOR, OPERATOR_ACCOUNT)}
        ),
        folder=tmp_path / "ca",
        domain="etude.dev",
        operator="etude-system:etude-operator",
        lifetime=LIFE,
        operator_hosts=[HOST],
    )
    identity = Identity(domain="etude.dev", namespace="etude-system", run="etude", role="issuer")
    own = IssuerCertificate(tmp_path / "ca", identity, LIFE)
    server = Server([], security=security_from_setting(""), open_credentials=own.credentials())
    certificates_pb2_grpc.add_CertificateServiceServicer_to_server(service, server.grpc_server)
    await server.start()
    yield World(tmp_path, server, service)
    await server.stop(0)


async def test_a_pod_gets_a_certificate_with_a_key_that_never_left_it(world: World) -> None:
    files = await request_certificate(world.petition)
    shown = material.read_material(pki.write(world.folder / "out", files))
    assert shown.identity.uri == TRAINER
    assert shown.ca == (world.folder / "trust" / "ca-1.crt").read_bytes()


async def test_a_token_for_something_else_gets_nothing(world: World) -> None:
    rewards = replace(world.petition, identity=TRAINER.replace("trainer", "rewards"))
    with pytest.raises(IssuerError, match="PERMISSION_DENIED"):
        await request_certificate(rewards)
    (world.folder / "token").write_text("stolen")
    with pytest.raises(IssuerError, match="PERMISSION_DENIED"):
        await request_certificate(world.petition)


def hosts(files: dict[str, bytes]) -> list[str]:
    made = x509.load_pem_x509_certificate(files["tls.crt"])
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)


async def test_only_the_operator_answers_to_the_names_of_its_service(world: World) -> None:
    assert hosts(await request_certificate(world.petition)) == ["demo-trainer.lab.svc"]
    (world.folder / "token").write_text("ours")
    files = await request_certificate(replace(world.petition, identity=OPERATOR))
    assert hosts(files) == ["operator.etude-system.svc", HOST]


async def test_an_issuer_whose_ca_was_replaced_at_once_shows_itself_by_the_new_one(
    world: World,
) -> None:
    await request_certificate(world.petition)
    for path in (world.folder / "ca").iterdir():
        path.unlink()
    add_ca(world.folder, "ca-1")
    files = await request_certificate(world.petition)
    assert files["ca.crt"] == (world.folder / "trust" / "ca-1.crt").read_bytes()


@dataclass
class Curious(MemoryTokenReviewer):
    """Notes every token that it sees."""

    asked: list[str] = field(default_factory=list)

    @override
    async def review_token(self, review: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(review["spec"]["token"])
        return {}


async def test_an_issuer_that_is_not_believed_never_sees_the_token(world: World) -> None:
    (world.folder / "trust" / "ca-1.crt").write_bytes(pki.Authority().pem)
    world.service.reviews = curious = Curious({})
    with pytest.raises(IssuerError, match="CERTIFICATE_VERIFY_FAILED"):
        await request_certificate(world.petition)
    assert curious.asked == []


@pytest.mark.parametrize(
    "identity", [TRAINER.replace("etude.dev", "etude.example"), TRAINER.replace("trainer", "king")]
)
async def test_nobody_is_asked_about_an_identity_that_nobody_gets(
    world: World, identity: str
) -> None:
    world.service.reviews = curious = Curious({})
    with pytest.raises(IssuerError, match="PERMISSION_DENIED"):
        await request_certificate(replace(world.petition, identity=identity))
    assert curious.asked == []


async def test_what_no_token_can_be_is_not_passed_on_to_the_api_server(world: World) -> None:
    world.service.reviews = curious = Curious({})
    (world.folder / "token").write_text("x" * 100_000)
    with pytest.raises(IssuerError, match="INVALID_ARGUMENT: token: is longer"):
        await request_certificate(world.petition)
    assert curious.asked == []


async def test_a_ca_that_is_added_is_believed_at_once_and_signs_when_all_know_it(
    world: World,
) -> None:
    first = (world.folder / "trust" / "ca-1.crt").read_bytes()
    second = add_ca(world.folder, "ca-2")
    young = await request_certificate(world.petition)
    assert young["ca.crt"] == first + second
    pki.write(world.folder / "before", young)
    world.service.now = lambda: pki.now() + LIFE
    later = await request_certificate(world.petition)
    made = x509.load_pem_x509_certificate(later["tls.crt"])
    made.verify_directly_issued_by(x509.load_pem_x509_certificate(second))


async def test_an_answer_that_is_nonsense_leaves_what_was_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, files = world.folder / "out", await request_certificate(world.petition)
    sidecar.install_files(out, files)
    answer = AsyncMock(return_value={**files, "tls.crt": b"nonsense"})
    monkeypatch.setattr(sidecar, "request_certificate", answer)
    settings = sidecar.Settings(folder=out, request=world.petition, host="127.0.0.1", probe_port=0)
    with pytest.raises(IssuerError, match="answers nonsense"):
        await sidecar.renew(settings)
    assert material.read_material(out).certificate == files["tls.crt"]


async def test_a_keeper_asks_anew_when_it_is_told_to_believe_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "LOOK_S", 0.01)
    monkeypatch.setattr(sidecar, "FIRST_DELAY_S", 0.01)
    out = world.folder / "out"
    settings = sidecar.Settings(folder=out, request=world.petition, host="127.0.0.1", probe_port=0)
    probes, stop = Probes(0), asyncio.Event()
    keeping = asyncio.create_task(sidecar.renew_until_stopped(settings, probes, stop))
    async with asyncio.timeout(WAIT_S):
        while not probes.ready:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        second = add_ca(world.folder, "ca-2")
        while second not in material.read_material(out).ca:  # noqa: ASYNC110 - it is another's file
            await asyncio.sleep(0.01)
    stop.set()
    await keeping


async def test_a_keeper_that_asked_an_issuer_with_yesterdays_cas_asks_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "LOOK_S", 0.01)
    second, out = add_ca(world.folder, "ca-2"), world.folder / "out"
    (world.folder / "ca" / "ca-2.crt").rename(world.folder / "later")
    settings = sidecar.Settings(folder=out, request=world.petition, host="127.0.0.1", probe_port=0)
    probes, stop = Probes(0), asyncio.Event()
    keeping = asyncio.create_task(sidecar.renew_until_stopped(settings, probes, stop))
    async with asyncio.timeout(WAIT_S):
        while not probes.ready:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        assert second not in material.read_material(out).ca
        (world.folder / "later").rename(world.folder / "ca" / "ca-2.crt")
        while second not in material.read_material(out).ca:  # noqa: ASYNC110 - it is another's file
            await asyncio.sleep(0.01)
    stop.set()
    await keeping


async def test_a_keeper_waits_for_its_issuer_and_then_replaces_before_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "FIRST_DELAY_S", 0.01)
    world.service.lifetime = datetime.timedelta(seconds=2)
    (world.folder / "token").rename(world.folder / "later")
    out = world.folder / "out"
    settings = sidecar.Settings(folder=out, request=world.petition, host="127.0.0.1", probe_port=0)
    probes, stop = Probes(0), asyncio.Event()
    keeping = asyncio.create_task(sidecar.renew_until_stopped(settings, probes, stop))
    await asyncio.sleep(0)
    assert not probes.ready
    (world.folder / "later").rename(world.folder / "token")
    seen: set[bytes] = set()
    async with asyncio.timeout(WAIT_S):
        while len(seen) < 3:
            try:
                seen.add(material.read_material(out).certificate)
            except UserError:
                assert not seen, "what is there stays readable"
            await asyncio.sleep(0.02)
    assert probes.ready
    stop.set()
    await keeping
    versions = [path for path in out.iterdir() if path.is_dir() and not path.is_symlink()]
    assert len(versions) == 1, "no old key is left"
    modes = {(out / name).stat().st_mode & 0o777 for name in ("tls.key", "tls.crt")}
    assert modes == {0o640}, "a role's container may run as another user of the pod's group"
