"""Destination of the traces of a run or a pool."""

from typing import Annotated

from pydantic import Field

from etude.common.api.meta import Model
from etude.common.store_urls import ENDPOINT

COLLECTOR = ENDPOINT.removesuffix("/?$") + r"(/[!-~]*)?$"
"""With a path, too, which the transport leaves out."""


class Observability(Model):
    """Destination of traces."""

    otlp_endpoint: Annotated[str, Field(max_length=512, pattern=COLLECTOR)] | None = None
    """OTLP gRPC endpoint for traces, read as a pod starts; gRPC takes port 443 if none is named.
    Without it a cluster keeps no traces, and `etude run` writes them to traces.jsonl in the run's
    folder."""
