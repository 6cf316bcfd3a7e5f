"""OpenTelemetry: one trace per rollout across processes, to a collector or to a file."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from opentelemetry import context, propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from typing_extensions import override


@dataclass(slots=True)
class FileSpanExporter(SpanExporter):
    """Appends each trace span as one JSON line.

    Several processes share the file: a batch is one write on an O_APPEND descriptor, which local
    file systems do not interleave.
    """

    path: Path

    @override
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        data = "".join(json.dumps(_row(span), separators=(",", ":")) + "\n" for span in spans)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            descriptor = os.open(self.path, flags, 0o644)
            try:
                os.write(descriptor, data.encode())
            finally:
                os.close(descriptor)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    @override
    def shutdown(self) -> None:
        return None


def _row(span: ReadableSpan) -> dict[str, object]:
    ids = span.get_span_context()
    service = span.resource.attributes.get("service.name", "")
    return {
        "trace_id": f"{ids.trace_id:032x}" if ids else "",
        "span_id": f"{ids.span_id:016x}" if ids else "",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "service": service,
        "name": span.name,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "attributes": dict(span.attributes or {}),
        "events": [event.name for event in span.events],
    }


def setup_tracing(
    service: str, *, otlp_endpoint: str | None, traces_file: Path | None
) -> TracerProvider:
    """Send this process's trace spans to the collector, else to the file, else nowhere."""
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter: SpanExporter | None = None
    if otlp_endpoint:
        # Only here: it loads the whole of metrics and logs, and every service starts with us.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )

        exporter = OTLPSpanExporter(otlp_endpoint, insecure=otlp_endpoint.startswith("http://"))
    elif traces_file is not None:
        exporter = FileSpanExporter(traces_file)
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The current trace context as gRPC metadata."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


@contextlib.contextmanager
def continue_trace(metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[None]:
    """Continue the caller's trace inside the block."""
    carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)
