"""TLS material from files: certificate, key, trusted CAs."""

import datetime
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from etude.common.errors import Problem, UserError
from etude.common.tls.identity import Identity, identities
from etude.common.tls.targets import REASON

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""Names in a folder, as a Secret of type kubernetes.io/tls has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """Certificate, key and trusted CAs of one side of a handshake."""

    ca: bytes
    """PEM certificates, one or more, that peers' must lead to."""
    certificate: bytes
    """PEM, with what leads to the peers' CA."""
    key: bytes = field(repr=False)
    identity: Identity
    not_before: datetime.datetime
    not_after: datetime.datetime


def read_material(folder: Path) -> TlsMaterial:
    """The material of a folder, checked as far as it can be alone.

    Raises:
        UserError: a file is missing, is damaged or does not belong to the others.
    """
    found = {name: _bytes(folder / name) for name in (CA, CERTIFICATE, KEY)}
    certificate = _certificates(found[CERTIFICATE], folder / CERTIFICATE)[0]
    _certificates(found[CA], folder / CA)
    _require_pair(certificate, found[KEY], folder / KEY)
    return TlsMaterial(
        ca=found[CA],
        certificate=found[CERTIFICATE],
        key=found[KEY],
        identity=_identity(certificate, folder / CERTIFICATE),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
    )


def stamp(folder: Path) -> str:
    """Changes whenever one of the files does, also where a Secret is replaced behind a link."""
    facts = []
    for name in (CA, CERTIFICATE, KEY):
        try:
            stat = (folder / name).stat()
        except OSError:
            facts.append("none")
        else:
            facts.append(f"{stat.st_ino} {stat.st_mtime_ns} {stat.st_size}")
    return hashlib.blake2b(" ".join(facts).encode(), digest_size=8).hexdigest()


def _identity(certificate: x509.Certificate, path: Path) -> Identity:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        found = []
    else:
        found = identities(names.get_values_for_type(x509.UniformResourceIdentifier))
    if len(found) != 1:
        fix = "issue it with one URI name, spiffe://DOMAIN/ns/NAMESPACE/run/RUN/role/ROLE"
        raise _problem(path, f"names {len(found)} identities of ours, not one", fix)
    return found[0]


def _certificates(data: bytes, path: Path) -> list[x509.Certificate]:
    try:
        found = x509.load_pem_x509_certificates(data)
    except ValueError as cause:
        raise _problem(path, "holds no PEM certificate", "write it again") from cause
    return found


def _require_pair(certificate: x509.Certificate, key: bytes, path: Path) -> None:
    try:
        private = load_pem_private_key(key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature) as cause:
        raise _problem(
            path, "holds no PEM private key without a password", "write it again"
        ) from cause
    if private.public_key() != certificate.public_key():
        raise _problem(path, f"is not the key of {CERTIFICATE}", "replace both together")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        fix = "see docs/runbooks/certificates-expire.md"
        raise _problem(path, f"cannot be read: {cause.strerror}", fix) from cause


def _problem(path: Path, what: str, fix: str) -> UserError:
    return UserError(Problem(REASON, what, str(path), fix))


def read_bundle(folder: Path) -> bytes:
    """Every *.crt of a folder as one PEM text, in the order of their names."""
    found = (path.read_bytes().strip() for path in sorted(folder.glob("*.crt")))
    return b"".join(data + b"\n" for data in found if data)


def is_missing_authority(trust: bytes, told: bytes, now: datetime.datetime) -> bool:
    """Return true if a PEM text lacks an unexpired authority of another one."""
    wanted = {each for each in _authorities(told) if now < each.not_valid_after_utc}
    return not wanted <= _authorities(trust)


def _authorities(pem: bytes) -> set[x509.Certificate]:
    try:
        return set(x509.load_pem_x509_certificates(pem))
    except ValueError:  # there is none, or another's text
        return set()
