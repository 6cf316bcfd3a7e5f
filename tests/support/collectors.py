"""A collector of trace spans: an OTLP server that keeps what it is sent."""

import contextlib
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from typing_extensions import override


@dataclass(slots=True)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Every span that was sent, in the order of its end."""

    spans: list[trace_pb2.Span] = field(default_factory=list)
    endpoint: str = ""

    @override
    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[trace_pb2.Span]:
        """The spans of a name."""
        return [span for span in self.spans if span.name == name]


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens, at its `endpoint`."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    made = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)
    made.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None).wait()


def attributes(span: trace_pb2.Span) -> dict[str, object]:
    """Attributes by name, as plain values."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in span.attributes
    }
