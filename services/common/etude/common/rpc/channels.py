"""gRPC client channels: keepalive, retry and message limits; no other module builds channels."""

import json

import grpc

from etude.common.tls import targets
from etude.common.tls.transport import TransportSecurity, process_security

CHUNK_BYTES = 1 << 20
"""Largest piece of a stream: a bigger message blocks the event loop while it is serialised."""

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message that clients and servers take. A prompt of 2^20 tokens, which is the most that
rollout.maxTokens allows, has 3 MiB, as ids below 2^21 take three bytes."""

CONTROL_DEADLINE_S = 10.0
"""Deadline of calls that only read or change small state, in seconds."""

MAX_BACKOFF_MS = 5_000
"""By default the wait before the next try grows to two minutes, longer than a peer's restart."""

_IDEMPOTENT = [
    {"service": "etude.v1.RewardService", "method": "Score"},
    {"service": "etude.v1.WeightService", "method": "GetWeightStatus"},
    {"service": "etude.v1.WeightService", "method": "CommitVersion"},
    {"service": "etude.v1.EnvBrokerService", "method": "RenewLeases"},
    {"service": "etude.v1.EnvBrokerService", "method": "ReleaseLeases"},
    {"service": "etude.v1.RunService", "method": "Command"},
    {"service": "etude.v1.TurnKeyService", "method": "GetTurnKey"},
]

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": _IDEMPOTENT,
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.2s",
                    "maxBackoff": "5s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)

_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", _SERVICE_CONFIG),
]


def dial(
    target: str, *, max_backoff_ms: int = MAX_BACKOFF_MS, security: TransportSecurity | None = None
) -> grpc.aio.Channel:
    """A long-lived channel to host:port; connects on first use and reconnects automatically.

    Args:
        target: host:port, or NAME@HOST:PORT with the name of the server's certificate.
        max_backoff_ms: longest backoff before the next attempt to connect.
        security: certificates or none; this process's default unless given.

    Raises:
        UserError: it would leave the machine unencrypted, or does not name the server.
    """
    security = security or process_security()
    options = [*_OPTIONS, ("grpc.max_reconnect_backoff_ms", max_backoff_ms)]
    if security.credentials is not None:
        # Not without need, as in wire.py.
        from etude.common.tls.rotating_channel import RotatingChannel  # noqa: PLC0415

        namespace = security.credentials.identity.namespace
        return RotatingChannel(
            targets.require_server_name(target, namespace), security.credentials, options
        )
    address = targets.parse_target(target).address
    security.require_private(address, "the connection")
    return grpc.aio.insecure_channel(address, options=options)


def chunks(data: bytes) -> list[bytes]:
    """Data cut for a stream; empty data is one empty chunk, so that a receiver sees an end."""
    return [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)] or [b""]
