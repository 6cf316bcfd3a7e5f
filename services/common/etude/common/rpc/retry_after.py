"""Retry delay that a full server asks for in its gRPC status."""

from random import Random

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_RANDOM = Random()  # noqa: S311 - spreads retries, nothing secret depends on it
LEAST_S = 0.05
"""Shortest delay: a server that asks for none is not called in a loop without pause."""
MOST_S = 60.0
"""Longest delay that a server can ask for."""


def retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """Seconds before the same call is retried; None if a retry would not help.

    Random jitter adds up to half: calls that were refused together must not retry together.
    """
    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        return None
    try:
        told = _retry_info(error)
    except (ValueError, DecodeError):
        return None  # details that are not those of this status
    if told is None:
        return None
    asked_s: float = told.retry_delay.seconds + told.retry_delay.nanos / 1e9
    return min(MOST_S, max(LEAST_S, asked_s)) * _RANDOM.uniform(1.0, 1.5)


def _retry_info(error: grpc.aio.AioRpcError) -> error_details_pb2.RetryInfo | None:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # typed for the other API
    for box in () if status is None else status.details:
        told = error_details_pb2.RetryInfo()
        if box.Is(told.DESCRIPTOR) and box.Unpack(told):
            return told
    return None
