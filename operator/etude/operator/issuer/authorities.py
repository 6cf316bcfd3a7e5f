"""Certificate authorities of the issuer: the signing one and the trusted ones."""

import datetime
import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from etude.common.errors import Problem, UserError
from etude.operator import metrics

_NAME = re.compile(r"ca-([0-9]{1,9})\.crt").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A CA and its key."""

    certificate: x509.Certificate
    key: CertificateIssuerPrivateKeyTypes = field(repr=False)
    since: datetime.datetime
    """Time at which this issuer received it, or of the last restart."""

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    def is_valid(self, now: datetime.datetime) -> bool:
        begins, ends = self.certificate.not_valid_before_utc, self.certificate.not_valid_after_utc
        return begins <= now < ends


def signing_authority(
    authorities: Sequence[Authority], now: datetime.datetime, lifetime: datetime.timedelta
) -> Authority | None:
    """The signing CA: the last one that every holder of a certificate trusts.

    A certificate is issued with all CAs of that time. A CA that is older than the lifetime of a
    certificate is therefore known to all holders; before that its predecessor signs. So a CA is
    replaced by adding another one.

    Args:
        authorities: in the order in which they were added.
        now: the present.
        lifetime: of the certificates that are signed.
    """
    valid = [each for each in authorities if each.is_valid(now)]
    known = [each for each in valid if each.since + lifetime <= now]
    return known[-1] if known else next(iter(valid), None)


def trust_bundle(authorities: Sequence[Authority], now: datetime.datetime) -> bytes:
    """PEM of all trusted CAs, with those not valid yet, which may sign later."""
    return b"".join(each.pem for each in authorities if now < each.certificate.not_valid_after_utc)


def read_authorities(folder: Path) -> Sequence[Authority]:
    """Read the CAs of a folder, ca-1.crt and ca-1.key and so on, in the order of their numbers.

    Called for each certificate and each handshake: unchanged files are not parsed again, since
    loading a key tests its numbers for primality.

    Raises:
        UserError: the folder has none, or one cannot be read.
    """
    return _read(folder, _stamp(folder))


def _stamp(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """A value that changes with every file of the folder, also if one is replaced behind a link."""
    found = []
    for path in sorted(folder.glob("ca-*")):
        with suppress(OSError):  # replaced just now: reading it reports that
            stat = path.stat()
            found.append((path.name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


@functools.lru_cache(maxsize=4)
def _read(folder: Path, _stamp: object) -> Sequence[Authority]:
    numbered = {int(match[1]): path for path in folder.glob("*.crt") if (match := _NAME(path.name))}
    found = [_read_pair(numbered[number]) for number in sorted(numbered)]
    if not found:
        fix = "let the chart make it, or put ca-1.crt and ca-1.key into the Secret that it names"
        raise UserError(Problem("InvalidTls", "holds no CA", str(folder), fix))
    ends = max(each.certificate.not_valid_after_utc for each in found)
    metrics.CA_EXPIRY.set(ends.timestamp())
    return tuple(found)


def _read_pair(path: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        # The kubelet rewrites all files when one changes: then all are young, as after a
        # restart, and the first continues to sign.
        since = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        key = load_pem_private_key(path.with_suffix(".key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as cause:
        fix = "give a certificate and its key, in PEM without a password"
        raise UserError(Problem("InvalidTls", f"is not a CA: {cause}", str(path), fix)) from cause
    if key.public_key() != certificate.public_key():
        fix = "replace both at once"
        raise UserError(Problem("InvalidTls", "and its key do not belong together", str(path), fix))
    return Authority(certificate=certificate, key=key, since=since)  # type: ignore[arg-type]  # signs, as checked
