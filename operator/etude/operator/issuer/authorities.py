"""The CAs of an issuer: which of them signs, and which of them are to be believed."""

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
    """When this issuer was given it; later than that after a restart."""

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
    """The one that signs: the last that every holder of a certificate has heard of.

    Who got a certificate learned with it of every CA of that moment. One that was told of for the
    life of a certificate is therefore known to everybody; until the last one is, its predecessor
    signs. So a CA is replaced by adding another, however old that one is.

    Args:
        authorities: in the order in which they were added.
        now: the present.
        lifetime: of the certificates that are signed.
    """
    valid = [each for each in authorities if each.is_valid(now)]
    known = [each for each in valid if each.since + lifetime <= now]
    return known[-1] if known else next(iter(valid), None)


def trust(authorities: Sequence[Authority], now: datetime.datetime) -> bytes:
    """PEM of everyone to be believed, those included that have not begun: they may sign later."""
    return b"".join(each.pem for each in authorities if now < each.certificate.not_valid_after_utc)


def read(folder: Path) -> Sequence[Authority]:
    """Those of a folder, ca-1.crt and ca-1.key and so on, in the order of their numbers.

    Called for each certificate and each handshake: files that have not changed are not parsed
    again, for a key's numbers are tested for being prime.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    return _read(folder, _stamp(folder))


def _stamp(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Changes whenever a file of the folder does, also where it is replaced behind a link."""
    found = []
    for path in sorted(folder.glob("ca-*")):
        with suppress(OSError):  # replaced just now: what is read then says so
            stat = path.stat()
            found.append((path.name, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)


@functools.lru_cache(maxsize=4)
def _read(folder: Path, _stamp: object) -> Sequence[Authority]:
    numbered = {int(match[1]): path for path in folder.glob("*.crt") if (match := _NAME(path.name))}
    found = [_pair(numbered[number]) for number in sorted(numbered)]
    if not found:
        fix = "let the chart make it, or put ca-1.crt and ca-1.key into the Secret that it names"
        raise UserError(Problem("InvalidTls", "holds no CA", str(folder), fix))
    ends = max(each.certificate.not_valid_after_utc for each in found)
    metrics.CA_EXPIRY.set(ends.timestamp())
    return tuple(found)


def _pair(path: Path) -> Authority:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        # The kubelet writes all files anew when one changes: then all are young, as after a
        # restart, and the first goes on signing.
        since = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
        key = load_pem_private_key(path.with_suffix(".key").read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as cause:
        fix = "PEM without a password, a certificate and its key"
        raise UserError(Problem("InvalidTls", f"is no CA: {cause}", str(path), fix)) from cause
    if key.public_key() != certificate.public_key():
        fix = "replace both at once"
        raise UserError(Problem("InvalidTls", "and its key do not belong together", str(path), fix))
    return Authority(certificate=certificate, key=key, since=since)  # type: ignore[arg-type]  # signs, as checked
