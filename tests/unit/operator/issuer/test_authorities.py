"""Which CA signs, when there are several, and what it signs."""

import datetime
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
from etude.operator import metrics
from etude.operator.issuer import authorities, signing
from etude.operator.issuer.authorities import Authority

LIFE = datetime.timedelta(hours=24)
HOUR = datetime.timedelta(hours=1)
NOW = datetime.datetime(2026, 6, 1, tzinfo=datetime.UTC)
KEY = ec.generate_private_key(ec.SECP256R1())
TRAINER = Identity.parse("spiffe://etude.dev/ns/lab/run/demo/role/trainer")


def authority(
    age: datetime.timedelta,
    left: datetime.timedelta = 1_000 * HOUR,
    told: datetime.timedelta | None = None,
) -> Authority:
    """A CA of an age, which was told of for as long unless said otherwise."""
    made = pki.Authority(f"{age} old", begins=NOW - age, ends=NOW + left, key=KEY)
    since = NOW - (age if told is None else told)
    return Authority(certificate=made.certificate, key=KEY, since=since)


def test_a_ca_that_everybody_has_heard_of_signs_and_its_successor_waits() -> None:
    old, young = authority(100 * HOUR), authority(23 * HOUR)
    assert authorities.signing_authority([old, young], NOW, LIFE) is old
    assert authorities.signing_authority([old, young], NOW + HOUR, LIFE) is young


def test_a_ca_that_was_made_long_before_it_was_added_waits_all_the_same() -> None:
    first, second = authority(100 * HOUR), authority(500 * HOUR, told=HOUR)
    assert authorities.signing_authority([first, second], NOW, LIFE) is first
    assert authorities.signing_authority([first, second], NOW + 23 * HOUR, LIFE) is second


def test_the_first_ca_signs_at_once_and_after_every_restart() -> None:
    first = authority(datetime.timedelta())
    assert authorities.signing_authority([first], NOW, LIFE) is first
    restarted = [authority(age * HOUR, told=datetime.timedelta()) for age in (500, 100)]
    assert authorities.signing_authority(restarted, NOW, LIFE) is restarted[0]


def test_a_ca_that_ended_or_has_not_begun_signs_nothing_and_only_one_will_be_believed() -> None:
    ended, future = authority(2 * LIFE, left=-HOUR), authority(-HOUR)
    assert authorities.signing_authority([ended, future], NOW, LIFE) is None
    assert authorities.trust_bundle([ended, future], NOW) == future.pem


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 72), st.integers(0, 72)), min_size=1, max_size=4),
    st.integers(0, 200),
)
def test_whoever_holds_a_certificate_believes_the_one_that_signs(
    births: list[tuple[int, int]], at: int
) -> None:
    """For every moment: a holder who was served at any time within a life knows the signer.

    CAs are added one after the other, made before or after that.
    """
    added = sorted(told for _, told in births)
    known = [
        authority(-begin * HOUR, told=-told * HOUR)
        for (begin, _), told in zip(births, added, strict=True)
    ]
    now = NOW + at * HOUR
    for hours in range(24):
        served = now - hours * HOUR
        there = [each for each in known if each.since <= served]
        if authorities.signing_authority(there, served, LIFE) is None:
            continue  # nobody was served then
        signer = authorities.signing_authority(
            [each for each in known if each.since <= now], now, LIFE
        )
        assert signer is not None
        assert signer.pem in authorities.trust_bundle(there, served)


def request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    built = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return built.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def signed(left: datetime.timedelta = 1_000 * HOUR) -> x509.Certificate:
    key = signing.public_key(request(ec.generate_private_key(ec.SECP256R1())))
    ca = authority(48 * HOUR, left)
    pem = signing.sign_certificate(ca, key, TRAINER, now=NOW, lifetime=LIFE)
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
        authorities.read_authorities(tmp_path)
    made = pki.Authority()
    (tmp_path / "ca-1.crt").write_bytes(made.pem)
    with pytest.raises(UserError, match=r"ca-1\.crt"):
        authorities.read_authorities(tmp_path)
    (tmp_path / "ca-1.key").write_bytes(pki.Authority().key_pem)
    with pytest.raises(UserError, match="do not belong together"):
        authorities.read_authorities(tmp_path)
    (tmp_path / "ca-1.key").write_bytes(made.key_pem)
    assert [each.pem for each in authorities.read_authorities(tmp_path)] == [made.pem]


def test_cas_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made = {number: pki.Authority(f"ca-{number}") for number in (10, 9, 11)}
    for number, each in made.items():
        (tmp_path / f"ca-{number}.crt").write_bytes(each.pem)
        (tmp_path / f"ca-{number}.key").write_bytes(each.key_pem)
    found = [each.pem for each in authorities.read_authorities(tmp_path)]
    assert found == [made[number].pem for number in (9, 10, 11)]


def test_when_the_last_ca_ends_can_be_watched(tmp_path: Path) -> None:
    for number, days in ((1, 400), (2, 30)):
        made = pki.Authority(begins=NOW, ends=NOW + days * LIFE)
        (tmp_path / f"ca-{number}.crt").write_bytes(made.pem)
        (tmp_path / f"ca-{number}.key").write_bytes(made.key_pem)
    authorities.read_authorities(tmp_path)
    assert metrics.CA_EXPIRY._value.get() == (NOW + 400 * LIFE).timestamp()


REQUEST = request(KEY)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(REQUEST) - 1), st.integers(0, 255)), min_size=1, max_size=4
    ),
    length=st.integers(0, len(REQUEST)) | st.just(len(REQUEST)),
)
def test_a_damaged_request_is_refused_or_is_as_good_as_before(
    changes: list[tuple[int, int]], length: int
) -> None:
    damaged = bytearray(REQUEST)
    for place, value in changes:
        damaged[place] = value
    try:
        found = signing.public_key(bytes(damaged[:length]))
    except InvalidFieldError:
        return
    assert found == KEY.public_key()


@pytest.mark.parametrize(
    ("place", "value"), [(7, 44), (17, 1), (26, 1)], ids=["version", "kind of key", "curve"]
)
def test_a_request_of_a_kind_that_nobody_knows_is_refused(place: int, value: int) -> None:
    strange = bytearray(REQUEST)
    strange[place] = value
    with pytest.raises(InvalidFieldError):
        signing.public_key(bytes(strange))


def test_cas_are_parsed_again_only_once_their_files_have_changed(tmp_path: Path) -> None:
    def put(number: int) -> None:
        made = pki.Authority(f"ca-{number}")
        (tmp_path / f"ca-{number}.crt").write_bytes(made.pem)
        (tmp_path / f"ca-{number}.key").write_bytes(made.key_pem)

    put(1)
    first = authorities.read_authorities(tmp_path)
    assert authorities.read_authorities(tmp_path) is first
    put(2)
    assert len(authorities.read_authorities(tmp_path)) == 2
    put(1)
    assert authorities.read_authorities(tmp_path)[0].certificate != first[0].certificate
