"""gRPC server of every service: limits, health, reflection, rich errors, drain."""

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from typing_extensions import override

from etude.common.errors import EtudeError, FullError, InvalidFieldError
from etude.common.rpc.channels import MAX_MESSAGE_BYTES
from etude.common.tls import policy
from etude.common.tls.transport import TransportSecurity, process_security

log = logging.getLogger(__name__)

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Our channels ping while idle; without this a server takes that for abuse and hangs up.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_connection_age_ms", 1_800_000),
    # An interactive program may last a day; it would end with its connection.
    ("grpc.max_connection_age_grace_ms", 86_400_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one port would share it silently; a port in use must be an error.
    ("grpc.so_reuseport", 0),
]


def rich_status(error: EtudeError) -> status_pb2.Status:
    """The error as google.rpc.Status: reason code, field violations, retry time."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain="etude.dev")]
    if isinstance(error, InvalidFieldError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.what
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, FullError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        box = any_pb2.Any()
        box.Pack(detail)
        packed.append(box)
    return status_pb2.Status(code=error.code.value[0], message=str(error), details=packed)


Admission = Callable[[str, Any], None]
"""Raises if the caller of a method may not call it."""


@dataclass(slots=True)
class _Edge(grpc.aio.ServerInterceptor):
    """Authorizes callers, and answers our errors with their status, others with an incident id.

    The id is in the log, with the error.
    """

    wire: TransportSecurity

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            return _wrapped(handler, _guarded_stream(method, _behaviour(handler), self._admit))
        return _wrapped(handler, _guarded_unary(method, _behaviour(handler), self._admit))

    def _admit(self, method: str, context: policy.AuthenticatedCall) -> None:
        if self.wire.credentials is not None:
            policy.authorize(context, self.wire.credentials.identity, method)


def _behaviour(handler: Any) -> Callable[..., Any]:  # noqa: ANN401
    behaviour: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return behaviour


def _wrapped(handler: Any, behaviour: Callable[..., Any]) -> Any:  # noqa: ANN401
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def _guarded_unary(
    method: str, behaviour: Callable[..., Any], admit: Admission
) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:  # noqa: ANN401
        try:
            admit(method, context)
            return await behaviour(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            await _abort(method, error, context)

    return call


def _guarded_stream(
    method: str, behaviour: Callable[..., Any], admit: Admission
) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ANN401
        try:
            admit(method, context)
            async for response in behaviour(request, context):
                yield response
        except Exception as error:  # noqa: BLE001 - the boundary of the process
            await _abort(method, error, context)

    return call


async def _abort(method: str, error: Exception, context: Any) -> None:  # noqa: ANN401
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, EtudeError):
        status = rich_status(error)
    elif isinstance(error, ValueError):
        status = rich_status(InvalidFieldError("request", str(error)))
    else:
        incident = uuid.uuid4().hex[:12]
        log.error("incident %s in %s", incident, method, exc_info=error)
        status = status_pb2.Status(
            code=grpc.StatusCode.INTERNAL.value[0],
            message=f"internal error, see incident {incident} in the log",
        )
    await context.abort_with_status(rpc_status.to_status(status))


@dataclass(slots=True)
class Server:
    """One gRPC server with health, reflection and a drain that lets running calls end."""

    service_names: Sequence[str]
    """Full names, for health and reflection."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free port; after start() the real one."""
    security: TransportSecurity = field(default_factory=process_security)
    """Certificates or none; this process's default unless given."""
    open_credentials: grpc.ServerCredentials | None = None
    """For a server that asks clients for no certificate and authenticates them otherwise."""
    max_concurrent_calls: int | None = None
    """Further calls are refused and may be retried. No limit unless set."""
    grpc_server: grpc.aio.Server = field(init=False)
    _health: health.aio.HealthServicer = field(init=False)

    def __post_init__(self) -> None:
        self.grpc_server = grpc.aio.server(
            interceptors=[_Edge(self.security)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=self.max_concurrent_calls,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        names = (*self.service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc_server)

    async def start(self) -> None:
        """Listen; health stays NOT_SERVING until set_ready() is called.

        Raises:
            OSError: the port is taken.
            UserError: it would serve other machines unencrypted, and no setting allows that.
        """
        address = f"{self.host}:{self.port}"
        credentials = self.open_credentials
        if credentials is None and self.security.credentials is not None:
            credentials = self.security.credentials.for_server()
        if credentials is None:
            self.security.require_private(address, "what is served")
        try:
            if credentials is None:
                self.port = self.grpc_server.add_insecure_port(address)
            else:
                self.port = self.grpc_server.add_secure_port(address, credentials)
        except RuntimeError as cause:
            raise OSError(f"cannot listen on {self.host}:{self.port}: {cause}") from cause
        await self.set_ready(is_ready=False)
        await self.grpc_server.start()

    async def set_ready(self, *, is_ready: bool = True) -> None:
        """Tell health checkers whether to send calls here."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, let running ones end for grace_s, then close."""
        await self._health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s)
