"""Certificate authorities, and folders with certificates of theirs."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from etude.common.tls.identity import Identity

HOUR = datetime.timedelta(hours=1)
Key = ec.EllipticCurvePrivateKey


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def pem_of(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@dataclass
class Authority:
    """A CA of a test's own."""

    name: str = "test"
    begins: datetime.datetime = field(default_factory=lambda: now() - HOUR)
    ends: datetime.datetime = field(default_factory=lambda: now() + 24 * HOUR)
    key: Key = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    certificate: x509.Certificate = field(init=False)

    def __post_init__(self) -> None:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        usage = x509.KeyUsage(*(i in {5, 6} for i in range(9)))  # signs certificates and lists
        self.certificate = (
            self._builder(subject, self.key, self.begins, self.ends)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )

    def _builder(
        self, subject: x509.Name, key: Key, begins: datetime.datetime, ends: datetime.datetime
    ) -> x509.CertificateBuilder:
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return pem_of(self.key)

    def issue(
        self,
        identity: Identity,
        *,
        begins: datetime.datetime | None = None,
        ends: datetime.datetime | None = None,
        trusts: bytes = b"",
    ) -> dict[str, bytes]:
        """Files of a certificate, by name."""
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(identity.uri),
            x509.DNSName(identity.server_name),
        ]
        return self.certify(names, begins=begins, ends=ends, trusts=trusts)

    def certify(
        self,
        names: list[x509.GeneralName],
        *,
        begins: datetime.datetime | None = None,
        ends: datetime.datetime | None = None,
        trusts: bytes = b"",
    ) -> dict[str, bytes]:
        """Files of a certificate for some names, by name of the file."""
        key = ec.generate_private_key(ec.SECP256R1())
        begins, ends = begins or now() - HOUR, ends or now() + HOUR
        certificate = (
            self._builder(x509.Name([]), key, begins, ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        return {
            "ca.crt": trusts or self.pem,
            "tls.crt": certificate.public_bytes(Encoding.PEM),
            "tls.key": pem_of(key),
        }


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Put files where a process looks for them, as kubelet does: all of them at once."""
    folder.mkdir(parents=True, exist_ok=True)
    version = folder / f"..v{len(list(folder.glob('..v*')))}"
    version.mkdir()
    for name, data in files.items():
        (version / name).write_bytes(data)
    link = folder / "..data.new"
    link.symlink_to(version.name)
    link.rename(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    return folder
