"""Certificate requests to an issuer."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from etude.common.errors import UnavailableError
from etude.common.tls import targets
from etude.common.tls.material import CA, CERTIFICATE, KEY, read_bundle
from etude.v1 import certificates_pb2, certificates_pb2_grpc

DEADLINE_S = 10.0


class IssuerError(UnavailableError):
    """The issuer did not answer, or refused the request."""

    reason = "IssuerUnreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateRequest:
    """A request for a certificate: identity, issuer, token and trusted CAs."""

    identity: str
    """SPIFFE URI."""
    issuer: str
    """host:port, the host by its Service's name."""
    token: Path
    """A token of the cluster for the identity as its audience; the kubelet keeps it fresh."""
    trust: Path
    """Folder with the CAs that the issuer's own certificate may come from."""


async def request_certificate(
    petition: CertificateRequest, learned: bytes = b""
) -> dict[str, bytes]:
    """New files for a folder of certificates, by name; the key is made here.

    Args:
        petition: identity, issuer and token.
        learned: PEM certificates of CAs that an earlier answer named.

    Raises:
        IssuerError: no certificate was issued.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    signing_request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )
    try:
        token = petition.token.read_text(encoding="utf-8").strip()
        trusted = read_bundle(petition.trust) + learned
    except OSError as cause:
        raise IssuerError(f"cannot ask {petition.issuer}: {cause}") from cause
    request = certificates_pb2.IssueCertificateRequest(
        signing_request=signing_request, identity=petition.identity, token=token
    )
    answer = await _call_issuer(petition.issuer, request, trusted)
    return {
        CA: answer.trust,
        CERTIFICATE: answer.certificate,
        KEY: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }


async def _call_issuer(
    issuer: str, request: certificates_pb2.IssueCertificateRequest, trusted: bytes
) -> certificates_pb2.IssueCertificateResponse:
    target = targets.require_server_name(issuer, "")
    name = ("grpc.ssl_target_name_override", target.server_name)
    # Not by channels.dial, which needs the certificate that is requested here.
    credentials = grpc.ssl_channel_credentials(root_certificates=trusted)
    async with grpc.aio.secure_channel(target.address, credentials, options=[name]) as channel:
        stub = certificates_pb2_grpc.CertificateServiceStub(channel)
        try:
            return await stub.IssueCertificate(request, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as cause:
            raise IssuerError(f"{issuer}: {cause.code().name}: {cause.details()}") from cause
