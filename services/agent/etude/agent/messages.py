"""Messages of tool calls and results; hosts load them, so they load no numpy."""

from typing import cast

from etude.agent.tool_calls import ToolCall
from etude.agent.tools.base import ErrorKind, ToolOutcome
from etude.v1 import environments_pb2


def to_call_message(call: ToolCall) -> environments_pb2.ToolCall:
    """A call as a message to the environment."""
    return environments_pb2.ToolCall(
        call_id=call.call_id, name=call.name, arguments_json=call.arguments_json
    )


def to_result_message(call_id: str, outcome: ToolOutcome) -> environments_pb2.ToolResult:
    """A result as a message from the environment."""
    return environments_pb2.ToolResult(
        call_id=call_id,
        content=outcome.content.encode("utf-8", "replace"),
        is_error=outcome.is_error,
        error=cast("environments_pb2.ToolErrorKind", int(outcome.kind)),
        wall_ms=outcome.wall_ms,
        cpu_ms=outcome.cpu_ms,
        omitted_bytes=outcome.omitted_bytes,
    )


def from_result_message(message: environments_pb2.ToolResult) -> ToolOutcome:
    """A result from its message."""
    return ToolOutcome(
        content=message.content.decode("utf-8", "replace"),
        kind=ErrorKind(message.error),
        omitted_bytes=message.omitted_bytes,
        cpu_ms=message.cpu_ms,
        wall_ms=message.wall_ms,
    )
