"""The issuer's server, from start to end."""

import asyncio
import datetime
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from etude.common.errors import Problem, UserError
from etude.common.probes import Probes
from etude.common.process import shutdown_signals
from etude.common.rpc import server as rpc_server
from etude.common.tls.identity import Identity
from etude.operator.issuer import authorities, signing
from etude.operator.issuer.authorities import Authority
from etude.operator.issuer.service import ApiTokenReviewer, CertificateService, utc_now
from etude.operator.issuer.settings import Settings
from etude.operator.kube.rest import RestClient
from etude.v1 import certificates_pb2, certificates_pb2_grpc


@dataclass(slots=True)
class IssuerCertificate:
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
        found = authorities.signing_authority(
            authorities.read_authorities(self.folder), utc_now(), self.lifetime
        )
        if found is None:
            fix = "see docs/runbooks/certificates-expire.md"
            raise UserError(Problem("InvalidTls", "holds no CA valid now", str(self.folder), fix))
        return found

    def _configuration(self, authority: Authority) -> grpc.ServerCertificateConfiguration:
        now = utc_now()
        key = ec.generate_private_key(ec.SECP256R1())
        shown = signing.sign_certificate(
            authority, key.public_key(), self.identity, now=now, lifetime=self.lifetime
        )
        self._signed, self._by = now, authority.certificate
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return grpc.ssl_server_certificate_configuration([(private, shown)])


DRAIN_S = 5.0
MOST_CALLS = 64
"""Limit of concurrent calls: clients are not authenticated, and each call asks the API server."""


async def serve(settings: Settings) -> None:
    """Answer until SIGTERM.

    Raises:
        UserError: there is no CA, or no API server.
    """
    rest = await RestClient.connect(settings.kubeconfig)
    service = CertificateService(
        reviews=ApiTokenReviewer(rest),
        folder=settings.folder,
        domain=settings.identity.domain,
        operator=settings.operator,
        nodes=settings.nodes,
        lifetime=settings.lifetime,
        operator_hosts=settings.operator_hosts,
    )
    names = [certificates_pb2.DESCRIPTOR.services_by_name["CertificateService"].full_name]
    own = IssuerCertificate(settings.folder, settings.identity, settings.lifetime)
    server = rpc_server.Server(
        names,
        settings.host,
        settings.port,
        open_credentials=own.credentials(),
        max_concurrent_calls=MOST_CALLS,
    )
    certificates_pb2_grpc.add_CertificateServiceServicer_to_server(service, server.grpc_server)
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    try:
        with shutdown_signals(stop):
            await probes.start()
            await server.start()
            await server.set_ready()
            probes.ready = True
            await stop.wait()
            probes.ready = False
            await server.stop(DRAIN_S)
    finally:
        await probes.stop()
        await rest.close()
