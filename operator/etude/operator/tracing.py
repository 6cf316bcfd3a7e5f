"""Tracing: OpenTelemetry spans of reconcile passes and their API requests."""

import contextlib
from collections.abc import Callable, Iterator

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from etude.operator.manifests import Ref

tracer = trace.get_tracer("etude.operator")


@contextlib.contextmanager
def trace_reconcile(key: Ref) -> Iterator[None]:
    """Trace one pass over an object."""
    attributes = {
        "k8s.namespace.name": key.namespace,
        "etude.kind": key.kind,
        "etude.name": key.name,
    }
    with tracer.start_as_current_span("etude.reconcile", attributes=attributes):
        yield


def record_num_actions(actions: int) -> None:
    """Set the number of actions on the span of the current pass."""
    trace.get_current_span().set_attribute("etude.actions", actions)


def record_result(result: str) -> None:
    """Set the result on the span of the current pass; anything but ok is an error."""
    span = trace.get_current_span()
    span.set_attribute("etude.result", result)
    if result != "ok":
        span.set_status(Status(StatusCode.ERROR, result))


@contextlib.contextmanager
def trace_request(verb: str, resource: str) -> Iterator[Callable[[int], None]]:
    """Trace an API request of a pass; requests of watches and lease renewals have no span."""
    if not trace.get_current_span().is_recording():
        yield _ignore_status
        return
    attributes = {"http.request.method": verb, "etude.resource": resource}
    about = tracer.start_as_current_span(
        f"{verb} {resource}", kind=SpanKind.CLIENT, attributes=attributes
    )
    with about as span:

        def set_status(status: int) -> None:
            span.set_attribute("http.response.status_code", status)
            if status >= 400:
                span.set_status(Status(StatusCode.ERROR))

        yield set_status


def _ignore_status(_: int) -> None:
    return None
