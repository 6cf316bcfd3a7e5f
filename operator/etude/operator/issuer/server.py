"""The issuer's server, from start to end."""

import asyncio

from etude.common import serving
from etude.common.probes import Probes
from etude.operator.cluster.rest import Rest
from etude.operator.issuer.main import Settings
from etude.operator.issuer.own import Own
from etude.operator.issuer.service import ApiReviews, CertificateService
from etude.v1 import certificates_pb2, certificates_pb2_grpc

DRAIN_S = 5.0
MOST_CALLS = 64
"""Limit of concurrent calls: clients are not authenticated, and each call asks the API server."""


async def serve(settings: Settings) -> None:
    """Answer until SIGTERM.

    Raises:
        UserError: there is no CA, or no API server.
    """
    rest = await Rest.connect(settings.kubeconfig)
    service = CertificateService(
        reviews=ApiReviews(rest),
        folder=settings.folder,
        domain=settings.identity.domain,
        operator=settings.operator,
        lifetime=settings.lifetime,
        operator_hosts=settings.operator_hosts,
    )
    names = [certificates_pb2.DESCRIPTOR.services_by_name["CertificateService"].full_name]
    own = Own(settings.folder, settings.identity, settings.lifetime)
    server = serving.Server(
        names,
        settings.host,
        settings.port,
        open_credentials=own.credentials(),
        most_calls=MOST_CALLS,
    )
    certificates_pb2_grpc.add_CertificateServiceServicer_to_server(service, server.grpc_server)
    probes = Probes(settings.probe_port, settings.host)
    stop = asyncio.Event()
    try:
        with serving.shutdown_signals(stop):
            await probes.start()
            await server.start()
            await server.ready()
            probes.ready = True
            await stop.wait()
            probes.ready = False
            await server.stop(DRAIN_S)
    finally:
        await probes.stop()
        await rest.close()
