"""Which CA signs, when there are several, and what it signs."""

import datetime
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import pki

from etude.common.errors import InvalidFieldError, UserError
from etude.common.tls.identity import Identity
from etude.operator.issuer import authorities, signing
from etude.operator.issuer.authorities import Authority

LIFE = datetime.timedelta(hours=24)
HOUR = datetime.timedelta(hours=1)
NOW = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)
KEY = ec.generate_private_key(ec.SECP256R1())
TRAINER = Identity.parse("spiffe://etude.dev/ns/lab/run/demo/role/trainer")


def authority(age: datetime.timedelta, left: datetime.timedelta = 1_000 * HOUR) -> Authority:
    made = pki.Authority(f"{age} old", begins=NOW - age, ends=NOW + left, key=KEY)
    return Authority(certificate=made.certificate, key=KEY)


def test_a_ca_that_everybody_has_heard_of_signs_before_a_younger_one() -> None:
    old, young = authority(100 * HOUR), authority(23 * HOUR)
    assert authorities.signing([old, young], NOW, LIFE) is old
    assert authorities.signing([young, old], NOW + HOUR, LIFE) is young


def test_the_first_ca_signs_at_once() -> None:
    first = authority(datetime.timedelta())
    assert authorities.signing([first], NOW, LIFE) is first


def test_a_ca_that_ended_or_has_not_begun_signs_nothing_and_is_not_believed() -> None:
    ended, future = authority(2 * LIFE, left=-HOUR), authority(-HOUR)
    assert authorities.signing([ended, future], NOW, LIFE) is None
    assert authorities.trust([ended, future], NOW) == b""


@settings(deadline=None)
@given(st.lists(st.integers(0, 72), min_size=1, max_size=4), st.integers(0, 200))
def test_whoever_holds_a_certificate_believes_the_one_that_signs(
    births: Sequence[int], at: int
) -> None:
    """For every moment: a holder who was served at any time within a life knows the signer."""
    known = [authority(-birth * HOUR) for birth in births]
    now = NOW + at * HOUR
    signer = authorities.signing(known, now, LIFE)
    if signer is None:
        assert now < min(each.certificate.not_valid_before_utc for each in known)
        return
    first = min(each.certificate.not_valid_before_utc for each in known)
    for hours in range(24):
        served = now - hours * HOUR
        if served >= first:
            assert signer.pem in authorities.trust(known, served)


def request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    built = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return built.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def signed(left: datetime.timedelta = 1_000 * HOUR) -> x509.Certificate:
    key = signing.public_key(request(ec.generate_private_key(ec.SECP256R1())))
    ca = authority(48 * HOUR, left)
    pem = signing.certificate(ca, key, TRAINER, now=NOW, lifetime=LIFE)
    return x509.load_pem_x509_certificate(pem)


def test_a_certificate_says_its_identity_and_its_service_and_is_no_ca() -> None:
    made = signed()
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [TRAINER.uri]
    assert names.get_values_for_type(x509.DNSName) == ["demo-trainer.lab.svc"]
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    made.verify_directly_issued_by(authority(48 * HOUR).certificate)


def test_a_certificate_never_outlives_its_ca() -> None:
    assert signed().not_valid_after_utc == NOW + LIFE
    assert signed(left=2 * HOUR).not_valid_after_utc == NOW + 2 * HOUR


def test_only_a_request_signed_by_a_key_of_the_right_kind_is_signed() -> None:
    good = request(KEY)
    for bad in (b"", b"nonsense", good[:-1], good[:-1] + bytes([good[-1] ^ 1])):
        with pytest.raises(InvalidFieldError, match="signing_request"):
            signing.public_key(bad)
    with pytest.raises(InvalidFieldError, match=r"P-256"):
        signing.public_key(request(rsa.generate_private_key(65_537, 2_048)))


def test_a_folder_without_a_ca_or_with_another_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no CA"):
        authorities.read(tmp_path)
    made = pki.Authority()
    (tmp_path / "ca-1.crt").write_bytes(made.pem)
    with pytest.raises(UserError, match=r"ca-1\.crt"):
        authorities.read(tmp_path)
    (tmp_path / "ca-1.key").write_bytes(pki.Authority().key_pem)
    with pytest.raises(UserError, match="do not belong together"):
        authorities.read(tmp_path)
    (tmp_path / "ca-1.key").write_bytes(made.key_pem)
    assert [each.pem for each in authorities.read(tmp_path)] == [made.pem]
