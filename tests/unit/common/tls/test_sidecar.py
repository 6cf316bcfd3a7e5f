"""When a keeper asks again, and how it puts files where others read them."""

import asyncio
import datetime
from pathlib import Path

import pytest
from tests.support import pki

from etude.common.probes import Probes
from etude.common.tls import material, sidecar
from etude.common.tls.certificate_request import CertificateRequest
from etude.common.tls.identity import Identity
from etude.common.tls.material import is_missing_authority

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
WHO = Identity(domain="etude.dev", namespace="lab", run="demo", role="trainer")


@pytest.mark.parametrize(
    ("clock", "hours"),
    [
        (NOW, 16),
        (NOW - 12 * HOUR, 16),  # a clock that is behind sees more life than there is
        (NOW + 12 * HOUR, 8),
    ],
)
def test_a_certificate_is_replaced_with_a_third_of_its_life_left(
    clock: datetime.datetime, hours: int
) -> None:
    assert sidecar.renewal_s(NOW, NOW + 24 * HOUR, clock) == pytest.approx(hours * 3_600)


def test_who_sees_it_ended_at_birth_does_not_ask_without_pause() -> None:
    late = NOW + 25 * HOUR
    assert sidecar.renewal_s(NOW, NOW + 24 * HOUR, late) == sidecar.LONGEST_DELAY_S


def test_a_keeper_that_was_killed_while_it_wrote_goes_on_after_that(tmp_path: Path) -> None:
    authority = pki.Authority()
    sidecar.install_files(tmp_path, authority.issue(WHO))
    (tmp_path / "..data.new").symlink_to("..gone")
    half = tmp_path / "..half"
    half.mkdir()
    (half / "tls.key").write_bytes(b"a key that nobody needs")
    files = authority.issue(WHO)
    sidecar.install_files(tmp_path, files)
    assert material.read_material(tmp_path).certificate == files["tls.crt"]
    left = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    assert [path.resolve() for path in left] == [(tmp_path / "..data").resolve()]


def test_an_answer_is_behind_that_leaves_out_a_ca_which_is_still_good() -> None:
    old, new = pki.Authority("old"), pki.Authority("new")
    ended = pki.Authority("ended", ends=pki.now() - pki.HOUR / 2)
    assert is_missing_authority(old.pem, old.pem + new.pem, pki.now())
    assert not is_missing_authority(new.pem + old.pem, old.pem + b"\n" + new.pem, pki.now())
    assert not is_missing_authority(new.pem, new.pem + ended.pem, pki.now()), (
        "no issuer names it again"
    )
    assert not is_missing_authority(new.pem, b"", pki.now()), (
        "the kubelet replaces the files just now"
    )


async def test_who_was_answered_by_an_issuer_that_is_behind_asks_soon_and_then_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica is behind for a minute; a ConfigMap that nobody mends may be so for days."""
    trust, out, waits = tmp_path / "trust", tmp_path / "out", list[float]()
    trust.mkdir()
    (trust / "ca.crt").write_bytes(pki.Authority("new").pem)
    petition = CertificateRequest(
        identity=WHO.uri, issuer="", token=tmp_path / "token", trust=trust
    )
    settings = sidecar.Settings(folder=out, request=petition, host="", probe_port=0)

    async def renew(settings: sidecar.Settings) -> float:
        sidecar.install_files(settings.folder, pki.Authority("old").issue(WHO))
        return 16 * 3_600.0

    async def waited(_: sidecar.Settings, __: bytes, wait_s: float, stop: asyncio.Event) -> None:
        waits.append(wait_s)
        if len(waits) == 12:
            stop.set()

    monkeypatch.setattr(sidecar, "renew", renew)
    monkeypatch.setattr(sidecar, "_wait_for_renewal", waited)
    await sidecar.renew_until_stopped(settings, Probes(0), asyncio.Event())
    assert waits[0] <= 1.5 * sidecar.LOOK_S
    assert sum(waits[:3]) > 3 * sidecar.LOOK_S
    assert waits[-1] == 16 * 3_600
