"""Certificate service: answers certificate requests of pods."""

import datetime
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
from typing_extensions import override

from etude.common.errors import ForbiddenError, InvalidFieldError, UnavailableError
from etude.common.tls.identity import OPERATOR, Identity
from etude.operator import metrics
from etude.operator.issuer import authorities, signing, token_review
from etude.operator.issuer.authorities import Authority
from etude.operator.kube.interface import ClusterError
from etude.operator.kube.rest import RestClient, parse_read_reply
from etude.operator.manifests import Manifest
from etude.v1 import certificates_pb2, certificates_pb2_grpc

log = logging.getLogger(__name__)

MAX_FIELD_BYTES = 16_384
"""Most bytes of a field of a request; a token has about a thousand."""
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


class TokenReviewer(Protocol):
    """Reviews tokens."""

    async def review_token(self, review: Manifest) -> Manifest:
        """The status of a TokenReview.

        Raises:
            ClusterError: no answer.
        """
        ...


@dataclass(slots=True)
class ApiTokenReviewer(TokenReviewer):
    """Asks the API server, which also checks that the token's pod exists."""

    rest: RestClient

    @override
    async def review_token(self, review: Manifest) -> Manifest:
        reply = await self.rest.request("POST", REVIEWS, body=review)
        status: Manifest = parse_read_reply(reply, "review a token").get("status") or {}
        return status


@dataclass(slots=True)
class MemoryTokenReviewer(TokenReviewer):
    """Knows tokens and their audiences from a test."""

    tokens: dict[str, tuple[str, str]]
    """Audience and user name by token."""

    @override
    async def review_token(self, review: Manifest) -> Manifest:
        audience, user = self.tokens.get(review["spec"]["token"], ("", ""))
        if audience not in review["spec"]["audiences"]:
            return {"authenticated": False}
        bound = {token_review.POD: ["pod-0"], token_review.POD_UID: ["uid-0"]}
        known = {"username": user, "extra": bound}
        return {"authenticated": True, "audiences": [audience], "user": known}


def utc_now() -> datetime.datetime:
    """The local time in UTC."""
    return datetime.datetime.now(datetime.UTC)


@dataclass(slots=True, kw_only=True)
class CertificateService(certificates_pb2_grpc.CertificateServiceServicer):
    """Signs for pods whose tokens the API server confirms."""

    reviews: TokenReviewer
    folder: Path
    """Its CAs; read for each certificate, so that another can be added."""
    domain: str
    operator: str
    """The operator's account, NAMESPACE:NAME."""
    lifetime: datetime.timedelta
    nodes: token_review.NodePools = token_review.NO_NODES
    operator_hosts: Sequence[str] = ()
    """DNS names of the operator's Service, where KEDA asks it."""
    now: Callable[[], datetime.datetime] = utc_now

    @override
    async def IssueCertificate(
        self,
        request: certificates_pb2.IssueCertificateRequest,
        context: grpc.aio.ServicerContext[
            certificates_pb2.IssueCertificateRequest, certificates_pb2.IssueCertificateResponse
        ],
    ) -> certificates_pb2.IssueCertificateResponse:
        _require_short(request)
        identity = _identity(request.identity)
        key = signing.public_key(request.signing_request)
        pod = await self._authorize(request.token, identity)
        known, now = authorities.read_authorities(self.folder), self.now()
        signed = signing.sign_certificate(
            self._signing(known, now),
            key,
            identity,
            now=now,
            lifetime=self.lifetime,
            also=self.operator_hosts if identity.role == OPERATOR else (),
        )
        metrics.CERTIFICATES.labels("issued").inc()
        log.info("certificate for %s, to pod %s", identity.uri, pod)
        return certificates_pb2.IssueCertificateResponse(
            certificate=signed, trust=authorities.trust_bundle(known, now)
        )

    async def _authorize(self, token: str, identity: Identity) -> str:
        """The pod that may have the certificate.

        Raises:
            ForbiddenError: it may not.
            UnavailableError: the token was not reviewed.
        """
        why = token_review.identity_problem(identity, domain=self.domain)
        status = {} if why else await self._review(token, identity)
        why = why or token_review.rejection_reason(
            status, identity, domain=self.domain, operator=self.operator, nodes=self.nodes
        )
        if why:
            metrics.CERTIFICATES.labels("refused").inc()
            log.warning("no certificate for %s: %s", identity.uri, why)
            raise ForbiddenError(f"{identity.uri}: {why}")
        return token_review.bound_pod(status)

    async def _review(self, token: str, identity: Identity) -> Manifest:
        try:
            return await self.reviews.review_token(token_review.review_manifest(token, identity))
        except ClusterError as cause:
            metrics.CERTIFICATES.labels("failed").inc()
            raise UnavailableError(f"the API server did not review the token: {cause}") from cause

    def _signing(self, known: Sequence[Authority], now: datetime.datetime) -> Authority:
        found = authorities.signing_authority(known, now, self.lifetime)
        if found is None:
            metrics.CERTIFICATES.labels("failed").inc()
            raise UnavailableError("no CA is valid now: see docs/runbooks/certificates-expire.md")
        return found


def _require_short(request: certificates_pb2.IssueCertificateRequest) -> None:
    """Check the length of all fields: clients are not authenticated, and the API server gets them.

    Raises:
        InvalidFieldError: a field is too long.
    """
    for where in ("signing_request", "identity", "token"):
        if len(getattr(request, where)) > MAX_FIELD_BYTES:
            raise InvalidFieldError(where, f"is longer than {MAX_FIELD_BYTES}")


def _identity(text: str) -> Identity:
    try:
        return Identity.parse(text)
    except ValueError as cause:
        raise InvalidFieldError("identity", str(cause)) from cause
