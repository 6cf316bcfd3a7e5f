"""Tools of an environment for other protocols: descriptions and calls.

Calls use the agent's token: nothing here can reset, snapshot, grade or open an environment.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from etude.agent.toolsets import tool_schema, toolset
from etude.envserver.environment_api.pool_client import TOOLSET, PoolClient
from etude.v1 import environments_pb2

_DEADLINE_S = 900.0
"""Longer than any tool's own limit."""


class ToolDescription(NamedTuple):
    """One tool."""

    name: str
    text: str
    parameters: Mapping[str, Any]
    """A JSON schema."""


class ToolAnswer(NamedTuple):
    """Output of a tool."""

    text: str
    is_error: bool


def tool_descriptions() -> Sequence[ToolDescription]:
    """Describe every tool."""
    found = []
    for name, tool in toolset(TOOLSET).tools.items():
        function: Any = tool_schema(name, tool)["function"]
        found.append(ToolDescription(name, function["description"], function["parameters"]))
    return found


async def call_tool(
    pool: PoolClient, lease: environments_pb2.Lease, name: str, arguments: Mapping[str, Any]
) -> ToolAnswer:
    """Run one tool; its refusal is an answer, too."""
    wanted = environments_pb2.ToolCall(
        call_id=secrets.token_hex(8), name=name, arguments_json=json.dumps(arguments)
    )
    request = environments_pb2.RunTurnRequest(
        lease_id=lease.lease_id, agent_token=lease.agent_token, calls=[wanted]
    )
    answer = await pool.tools_stub(lease).RunTurn(request, timeout=_DEADLINE_S)
    result = answer.results[0]
    return ToolAnswer(result.content.decode("utf-8", "replace"), result.is_error)
