"""The CAs of an issuer: which of them signs, and which of them are to be believed."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from etude.common.errors import Problem, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A CA and its key."""

    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes = field(repr=False)

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self.certificate.public_bytes(Encoding.PEM)

    def is_valid(self, now: datetime.datetime) -> bool:
        """Whether what it signs can be believed now."""
        begins, ends = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return begins <= now < ends


def signing(
    authorities: Sequence[Authority], now: datetime.datetime, lifetime: datetime.timedelta
) -> Authority | None:
    """The one that signs: the newest that every holder of a certificate has heard of.

    Who got a certificate learned with it of every CA of that moment. A CA that is older than the
    life of a certificate is therefore known to everybody; a younger one signs only where there is
    no older one, which is right after the installation. So a CA is replaced by adding another.
    """
    valid = sorted(
        (each for each in authorities if each.is_valid(now)),
        key=lambda each: each.certificate.not_valid_before_utc,
    )
    known = [each for each in valid if each.certificate.not_valid_before_utc + lifetime <= now]
    return known[-1] if known else next(iter(valid), None)


def trust(authorities: Sequence[Authority], now: datetime.datetime) -> bytes:
    """PEM of everyone to be believed."""
    return b"".join(each.pem for each in authorities if each.is_valid(now))


def read(folder: Path) -> list[Authority]:
    """Those of a folder: NAME.crt and NAME.key each, as the chart's Secret has them.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    found = [_pair(path) for path in sorted(folder.glob("*.crt"))]
    if not found:
        fix = "let the chart make it, or put NAME.crt and NAME.key into the Secret that it names"
        raise UserError(Problem("InvalidTls", "holds no CA", str(folder), fix))
    return found


def _pair(path: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        key = load_pem_private_key(path.with_suffix(".key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as cause:
        fix = "PEM without a password, a certificate and its key"
        raise UserError(Problem("InvalidTls", f"is no CA: {cause}", str(path), fix)) from cause
    if key.public_key() != certificate.public_key():
        fix = "replace both at once"
        raise UserError(Problem("InvalidTls", "and its key do not belong together", str(path), fix))
    return Authority(certificate=certificate, key=key)  # type: ignore[arg-type]  # signs, as checked
