"""Signing of certificates: checks a signing request and builds the certificate."""

import datetime
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from etude.common.errors import InvalidFieldError
from etude.common.tls.identity import Identity
from etude.operator.issuer.authorities import Authority

CLOCK_SKEW = datetime.timedelta(minutes=5)
"""A certificate is valid on a host whose clock is behind by this."""


def public_key(signing_request: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a PKCS #10 request that its holder signed.

    Raises:
        InvalidFieldError: the request is malformed, or its key is not supported.
    """
    where = "signing_request"
    try:
        request = x509.load_der_x509_csr(signing_request)
        is_signed = request.is_signature_valid
        key = request.public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as cause:
        raise InvalidFieldError(where, "is not a PKCS #10 request in DER") from cause
    if not is_signed:
        raise InvalidFieldError(where, "is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != ec.SECP256R1.name:
        raise InvalidFieldError(where, "must have a key of P-256")
    return key


def sign_certificate(
    authority: Authority,
    key: ec.EllipticCurvePublicKey,
    identity: Identity,
    *,
    now: datetime.datetime,
    lifetime: datetime.timedelta,
    also: Sequence[str] = (),
) -> bytes:
    """PEM of a certificate that names this identity and nothing else; never outlives its CA.

    Args:
        authority: the signing CA.
        key: public key of the holder.
        identity: the name in it.
        now: it is valid from a little before.
        lifetime: the longest validity.
        also: further DNS names of the holder.
    """
    ends = min(now + lifetime, authority.certificate.not_valid_after_utc)
    usage = x509.KeyUsage(*(number == 0 for number in range(9)))  # only digital signatures
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = authority.certificate
    built = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(now - CLOCK_SKEW, issuer.not_valid_before_utc))
        .not_valid_after(ends)
        # Critical, since the subject is empty: RFC 5280, 4.2.1.6.
        .add_extension(_names(identity, also), critical=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(_key_of(issuer), critical=False)
    )
    return built.sign(authority.key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _names(identity: Identity, also: Sequence[str]) -> x509.SubjectAlternativeName:
    hosts = (x509.DNSName(name) for name in (identity.server_name, *also))
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri), *hosts])


def _key_of(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        named = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())  # type: ignore[arg-type]  # of every kind that signs
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(named)
