"""The issuer's own certificate, signed by its own CA."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from etude.common.errors import Problem, UserError
from etude.common.tls.identity import Identity
from etude.operator.issuer import authorities, signing
from etude.operator.issuer.authorities import Authority
from etude.operator.issuer.service import utc_now


@dataclass(slots=True)
class Own:
    """Serves a certificate of the present signing CA that is in the first half of its lifetime."""

    folder: Path
    identity: Identity
    lifetime: datetime.timedelta
    _signed: datetime.datetime | None = None
    _by: x509.Certificate | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Server credentials without client certificates: clients have none yet."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(self._authority()),
            self._fetch,  # type: ignore[arg-type]  # None, for no change, is missing in the stubs
            require_client_authentication=False,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        authority = self._authority()
        is_young = self._signed is not None and utc_now() - self._signed < self.lifetime / 2
        is_same = self._by == authority.certificate
        return None if is_young and is_same else self._configuration(authority)

    def _authority(self) -> Authority:
        found = authorities.signing(authorities.read(self.folder), utc_now(), self.lifetime)
        if found is None:
            fix = "see docs/runbooks/certificates-expire.md"
            raise UserError(Problem("InvalidTls", "holds no CA valid now", str(self.folder), fix))
        return found

    def _configuration(self, authority: Authority) -> grpc.ServerCertificateConfiguration:
        now = utc_now()
        key = ec.generate_private_key(ec.SECP256R1())
        shown = signing.certificate(
            authority, key.public_key(), self.identity, now=now, lifetime=self.lifetime
        )
        self._signed, self._by = now, authority.certificate
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return grpc.ssl_server_certificate_configuration([(private, shown)])
